"""Keeps measured costs of steps, by machine, device, model and shapes.

moejax.costs.measure measures them. docs/explanation/cost_model.md explains them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from host_offload.sizing.cost_model import VERSION, CostError, CostModel
from moejax.cache import cache_root, write_whole
from moejax.costs.other_programs import is_busy, is_busy_now
from moejax.errors import UserError
from moejax.models.model_config import config_digest
from moejax.step.step_parts import StepSpec


def identity(steps: StepSpec) -> dict[str, Any]:
    """Returns everything that costs depend on, in the form that JSON gives back. Costs of another
    identity are not used."""
    found = {
        "machine": platform.node(),
        "processors": os.cpu_count(),
        "device": steps.device_kind,
        "runtime": steps.runtime,
        "jax": jax.__version__,
        "driver": steps.driver,
        "ops": dataclasses.asdict(steps.ops),
        "model": config_digest(steps.config),
        "dtype": steps.dtype,
        "expert_bytes": [record.nbytes for record in steps.layout.records],
        "shapes": dataclasses.asdict(steps.shapes),
    }
    if steps.formats is not None:
        # Versions of equal bytes in cells may be others in the store (lossless12 in transit).
        found["versions"] = [[v.cell.version, v.store.version] for v in steps.formats]
    if steps.store != "memory":
        found["store"] = steps.store
    if steps.trace_arrays:  # other executables, which give out more
        found["trace_arrays"] = sorted(steps.trace_arrays)
    return json.loads(json.dumps(found))


def cost_file(about: dict[str, Any]) -> Path:
    """Returns the file of the costs with this identity. Files of another format have other names,
    so another release measures again and overwrites nothing."""
    identity = json.dumps([VERSION, about], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    kind = "".join(c if c.isalnum() else "-" for c in about["device"].lower())
    return cache_root() / "costs" / f"{kind}-{digest[:16]}.json"


def find_cost_model(about: dict[str, Any]) -> CostModel | None:
    """Returns the costs measured before for this identity, or None without any or if the cache may
    not be searched. Raises UserError like load_cost_model."""
    path = cost_file(about)
    return load_cost_model(path, about) if os.path.exists(path) else None


def find_quiet_costs(about: dict[str, Any]) -> CostModel | None:
    """Returns find_cost_model, but None for costs that were measured beside other programs, if the
    machine is quiet now. Call it where they can be measured again."""
    found = find_cost_model(about)
    if found is not None and is_busy(found.about.get("others")) and not is_busy_now():
        return None
    return found


def load_cost_model(path: str | os.PathLike[str], about: dict[str, Any] | None = None) -> CostModel:
    """Returns the costs in a file.

    - `about`: the identity that they must have; None: any.

    Raises UserError for a file that cannot be read, is damaged, of another version, or of another
    identity.
    """
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
    """Writes the file whole or not at all. Raises UserError if that fails."""
    write_whole(path, json.dumps(model.to_json(), indent=1) + "\n")
