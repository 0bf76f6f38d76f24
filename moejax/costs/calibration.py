"""Calibration: what steps cost here (host_offload.sizing.cost_model), measured once and kept.

moejax.costs.step_costs measures. docs/cost_model.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from host_offload.control.interface import Costs
from host_offload.sizing.cost_model import CostError, CostModel
from moejax.cache import cache_root, write_whole
from moejax.costs.step_costs import measure
from moejax.errors import UserError
from moejax.models.model_config import config_digest
from moejax.step.runner import Runner

if TYPE_CHECKING:
    from moejax.serve.llm import LLM

log = logging.getLogger("moejax")

# ---- what others call


def costs_for(engine: LLM | Runner) -> Costs:
    """What policies see of cost_model_for."""
    return cost_model_for(engine).costs()


def cost_model_for(
    engine: LLM | Runner, *, force: bool = False, report: Callable[[str], None] | None = None
) -> CostModel:
    """The costs of an LLM's or a runner's steps, from the cache; measured where it has none for
    this machine, device, versions, model and start-up shapes, or with force, and kept.

    Measuring takes seconds to a minute and an LLM or runner that has not run anything; it leaves
    nothing resident. report: called with what is done now. Raises UserError for one that has run
    something, for an arena that is too small, and for a cached file that is damaged. Costs that
    cannot be kept are only warned of.
    """
    runner = engine if isinstance(engine, Runner) else engine.engine.runner
    about = identity(runner)
    path = cost_file(about)
    if not force and (kept := kept_cost_model(about)) is not None:
        return kept
    granted = None
    if not isinstance(engine, Runner):
        if engine.engine.statistics.requests or engine.engine.control is not None:
            raise UserError(
                "costs are measured on an LLM that has run nothing and has no policies that look "
                "at steps; call it first, or `moejax calibrate` with the same options"
            )
        granted = engine.engine.scheduler.arena.cell_row.copy()
    log.info("measuring what steps cost here, once; `moejax calibrate` does it ahead of need")
    model = measure(runner, report=report)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    model = dataclasses.replace(model, about={**about, **model.about, "created": now})
    if granted is not None:
        runner.grant_cells(granted)
    try:
        write_cost_model(path, model)
    except UserError as error:
        log.warning("%s: they are measured at every start", error)
    return model


def cost_model_of(model: str | os.PathLike[str], **options: Any) -> CostModel:
    """cost_model_for of LLM(model, **options), which is closed again."""
    from moejax.serve.llm import LLM

    with LLM(model, progress=False, **options) as llm:
        return cost_model_for(llm)


# ---- files


def identity(runner: Runner) -> dict[str, Any]:
    """What figures depend on; others are not taken for these. As JSON would give it back."""
    device = runner.device
    found = {
        "machine": platform.node(),
        "processors": os.cpu_count(),
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "jax": jax.__version__,
        "driver": runner.driver,
        "ops": dataclasses.asdict(runner.ops),
        "model": config_digest(runner.config),
        "dtype": str(jax.tree.leaves(runner.state["embedding"])[0].dtype),
        "expert_bytes": [record.nbytes for record in runner.layout.records],
        "shapes": dataclasses.asdict(runner.shapes),
    }
    if runner.formats is not None:
        # Versions of equal bytes in cells may be others in the store (lossless12 in transit).
        found["versions"] = [[v.cell.version, v.store.version] for v in runner.formats]
    if runner.trace_arrays:  # other executables, which give out more
        found["trace_arrays"] = sorted(runner.trace_arrays)
    return json.loads(json.dumps(found))


def cost_file(about: dict[str, Any]) -> Path:
    """Where the costs with this identity are kept."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    kind = "".join(c if c.isalnum() else "-" for c in about["device"].lower())
    return cache_root() / "costs" / f"{kind}-{digest[:16]}.json"


def kept_cost_model(about: dict[str, Any]) -> CostModel | None:
    """The costs that were measured before for this identity; None where none are, or where the
    cache may not be searched. Raises UserError as load_cost_model."""
    path = cost_file(about)
    return load_cost_model(path, about) if os.path.exists(path) else None


def load_cost_model(path: str | os.PathLike[str], about: dict[str, Any] | None = None) -> CostModel:
    """The costs in a file. about: whose they must be; None: whoever's. Raises UserError for a file
    that cannot be read, is damaged, of another version, or somebody else's."""
    mend = "delete it, or run `moejax calibrate --force`"
    try:
        model = CostModel.from_json(json.loads(Path(path).read_text()))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except CostError as error:
        raise UserError(f"{path}: {error}; {mend}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is no JSON ({error}); {mend}") from error
    for name, value in (about or {}).items():
        if model.about.get(name) != value:
            raise UserError(
                f"{path} has costs of another {name}: {model.about.get(name)}, here it is {value}; "
                f"{mend}"
            )
    return model


def write_cost_model(path: Path, model: CostModel) -> None:
    """Writes the file whole or not at all. Raises UserError where that is not possible."""
    try:
        write_whole(path, json.dumps(model.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"costs cannot be written to {path} ({error.strerror})") from error
