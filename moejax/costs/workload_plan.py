"""Plans from a trace how to split a memory between experts and KV.

Nothing runs. A plan comes from miss curves of the trace (host_offload.sizing: configurator,
right_size) and from the costs that `moejax calibrate` measured. docs/how-to/memory.md explains its
use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Spec
from host_offload.simulate.prediction import Prediction, predict
from host_offload.simulate.simulator import spec_of
from host_offload.simulate.timeline import Link, TimelineEvent
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.cost_model import CostModel
from host_offload.sizing.right_size import WorkingSet, working_sets
from host_offload.sizing.split import Division, division_of, miss_costs
from host_offload.traces.reader import Trace, TraceError, read_trace
from moejax.cache import cache_root
from moejax.costs.other_programs import is_busy
from moejax.costs.store import load_cost_model
from moejax.errors import UserError, user_errors

log = logging.getLogger("moejax")


@dataclasses.dataclass(frozen=True)
class PlannedSplit:
    """A memory's split between experts and KV, and what it is predicted to cost."""

    memory: int
    """Bytes of the arena, whole slots."""
    slot_bytes: int
    cells: tuple[int, ...]
    """Cells of each layer."""
    kv_pages: int
    kv_tokens: int
    expert_bytes: int
    kv_bytes: int
    references: int
    """Experts that the trace's steps needed, over all steps and layers."""
    expert_misses: float
    """Predicted expert misses for the trace, first uses left out."""
    link_bytes: int
    """Bytes that experts cross the link with, predicted for the trace, first uses included."""
    kv_misses: float
    miss_s: float
    """Seconds that the misses cost."""
    step_s: float | None
    """Predicted time of a decode step on the trace; None without such steps."""
    tokens_per_s: float
    """Predicted tokens a second, prefill steps included."""
    working_sets: tuple[WorkingSet, ...]
    """Working sets of all users together, then of each user."""

    def options(self) -> dict[str, Any]:
        """Arguments of LLM, which `--config FILE` reads too. They have cells in numbers only if
        layers have different ones: with equal ones `resize` may continue from the plan."""
        found: dict[str, Any] = {"expert_budget": self.expert_bytes, "kv_budget": self.kv_bytes}
        if len(set(self.cells)) > 1:
            found["cells"] = list(self.cells)
        return found


@user_errors(TraceError)
def workload_spec(trace: Trace) -> Spec:
    """Returns the Spec of a trace that a plan can be made from. Raises UserError for a trace in
    which no request ends, and for one that mixes versions."""
    spec = spec_of(trace.header)
    if not any(len(turn.pages) for turn in turns_of(trace)):
        raise UserError(
            f"no request ends in the trace {trace.directory}, so it says nothing about KV"
        )
    if len(spec.version_bytes) > 1:
        raise UserError(
            f"the trace {trace.directory} mixes {' and '.join(spec.version_bytes)}, whose cells "
            "differ in size and whose misses differ in price; a plan is of one version: record "
            "the workload with --precision of one, its routing is what counts"
        )
    return spec


class Planner:
    """Plans memory from a trace and a machine's costs.

    - `queue`: the link that transfers pass beside the steps; None: experts move within the steps.

    Raises UserError like workload_spec, and for costs of another model or dtype, or of experts of
    another size.
    """

    def __init__(self, trace: Trace, model: CostModel, queue: Link | None = None):
        self.trace, self.model, self.queue = trace, model, queue
        self.spec = workload_spec(trace)
        if reason := _misfit(trace, self.spec, model):
            raise UserError(f"the costs do not fit the trace {trace.directory}: {reason}")

    @user_errors()
    def split(
        self, memory: int, *, cells: str = "uniform", kv_overflow: str = "swap"
    ) -> PlannedSplit:
        """Returns the split of `memory` bytes by WiSP's configurator, with the predicted time of
        the trace's steps.

        - `cells`: how layers share the experts' slots.

        Raises UserError, which says what is needed, for a memory that is too small.
        """
        division = self._division(memory)
        costs = miss_costs(self.model.costs(), self.spec, kv_overflow)
        found = configure(turns_of(self.trace), division, costs, allocation=cells)
        prediction, slot = self._predict(found.cells.tolist()), division.unit
        done, step_s = prediction.simulation, prediction.mean_s("decode")
        return PlannedSplit(
            memory=division.total_bytes,
            slot_bytes=slot,
            cells=tuple(found.cells.tolist()),
            kv_pages=found.kv_pages,
            kv_tokens=found.kv_pages * self.spec.page_tokens,
            expert_bytes=int(found.cells.sum()) * slot,
            kv_bytes=found.kv_pages // division.unit_pages * slot,
            references=int(done.hits.sum() + done.misses.sum()),
            expert_misses=found.expert_misses,
            link_bytes=prediction.bytes,
            kv_misses=found.kv_misses,
            miss_s=found.seconds,
            step_s=None if np.isnan(step_s) else step_s,
            tokens_per_s=prediction.tokens_per_s,
            working_sets=tuple(working_sets(self.trace)),
        )

    def timeline(self, split: PlannedSplit) -> list[TimelineEvent]:
        """Returns what the trace's steps do at which time with a split."""
        return list(self._predict(split.cells, draw=True).events)

    def _predict(self, cells: Sequence[int], *, draw: bool = False) -> Prediction:
        options = {"cells": cells, "driver": "device"}
        return predict(self.trace, self.model, link=self.queue, draw=draw, **options)

    def _division(self, memory: int) -> Division:
        slot = self.spec.slot_bytes or 1
        if memory < slot:
            raise UserError(f"{memory} bytes are less than one slot, which has {slot}")
        return division_of(dataclasses.replace(self.spec, budget_bytes=memory))


@user_errors(TraceError)
def open_trace(directory: str | os.PathLike[str]) -> Trace:
    """Opens a trace. Raises UserError for a directory that is no trace."""
    return read_trace(directory)


def costs_of_trace(trace: Trace, path: str | os.PathLike[str] | None = None) -> CostModel:
    """Returns the costs in a file. Without a file, returns costs measured on this machine for the
    trace's model, device, dtype, driver and version: those with its start-up shapes before others,
    the newest first.

    Costs in a named file may be of another device than the trace's, since routing holds for any
    device. Warns of costs that were measured on a busy machine. Raises UserError if there are no
    costs, and like load_cost_model.
    """
    if path is not None:
        return _warn_if_busy(load_cost_model(path), path)
    header = trace.header
    ran = {**header.spec, "device": header.machine.get("device")}
    others = {n: ran[n] for n in ("device", "dtype", "driver") if ran.get(n) is not None}
    wanted = {"model": header.config_digest, "machine": platform.node(), **others}
    found = []
    for file in sorted((cache_root() / "costs").glob("*.json")):
        about = {}  # a file that cannot be read is refused where it is named
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = dict(json.loads(file.read_text())["about"])
        if all(about.get(name) == value for name, value in wanted.items()):
            same = about.get("shapes") == header.spec.get("shapes")
            found.append((same, str(about.get("created", "")), file))
    reasons = ""
    for _, _, file in sorted(found, reverse=True):
        model = load_cost_model(file)
        if not (reason := _misfit(trace, spec_of(header), model)):
            return _warn_if_busy(model, file)
        reasons += f"; {file} does not fit: {reason}"
    said = ", ".join(f"{name} {value}" for name, value in others.items())
    raise UserError(
        f"no costs of the trace's model ({said}) were measured on this machine: run `moejax "
        f"calibrate MODEL` with the options of the run, or name a file with --costs{reasons}"
    )


def _warn_if_busy(model: CostModel, path: str | os.PathLike[str]) -> CostModel:
    others = model.about.get("others") or 0.0
    if is_busy(others):
        log.warning(
            "%s: other programs took %.0f%% of the processors while these costs were measured, so "
            "predicted times are too long; `moejax calibrate --force` measures again",
            path,
            100 * others,
        )
    return model


def _misfit(trace: Trace, spec: Spec, model: CostModel) -> str:
    """Returns why costs are not those of a trace's steps, or "" if they may be. Costs that do not
    say what they are of (`about`) are accepted."""
    header, about = trace.header, model.about
    sizes = np.unique(next(iter(spec.link_bytes.values()))).tolist()
    for what, of_trace, of_costs in (
        ("model", header.config_digest, about.get("model", header.config_digest)),
        ("dtype", header.spec.get("dtype"), about.get("dtype", header.spec.get("dtype"))),
        ("MoE layers", spec.layers, model.layers),
        ("experts", spec.experts, model.experts),
        ("top-k", spec.top_k, model.top_k),
    ):
        if of_trace != of_costs:
            return f"they are of {what} {of_costs}, the trace is of {of_trace}"
    if model.expert_bytes not in sizes:
        said = ", ".join(map(str, sizes))
        return f"their experts have {model.expert_bytes} bytes over the link, the trace's {said}"
    return ""
