"""Plans from a trace: how a memory should be split, what memory is enough, how many users fit.

Nothing runs: miss curves of the trace (host_offload.sizing.miss_curves, configurator, joint,
right_size) and the costs that `moejax calibrate` measured say it. docs/memory.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Costs, Spec
from host_offload.simulate.prediction import Prediction, predict
from host_offload.simulate.simulator import spec_of
from host_offload.simulate.timeline import Link, TimelineEvent
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.cost_model import CostModel
from host_offload.sizing.joint import DecodeModel, decode_model
from host_offload.sizing.miss_curves import trace_curves
from host_offload.sizing.right_size import (
    EPSILON,
    Capacity,
    WorkingSet,
    memory_for,
    users_for,
    working_sets,
)
from host_offload.sizing.split import Division, MissCosts, division_of, link_costs, miss_costs
from host_offload.traces.reader import Trace, TraceError, read_trace
from moejax.cache import cache_root
from moejax.costs.store import load_cost_model
from moejax.errors import UserError, user_errors


@dataclasses.dataclass(frozen=True)
class PlannedSplit:
    """A memory's split between experts and KV, and what it is predicted to cost."""

    memory: int
    """Bytes of the arena, whole slots."""
    slot_bytes: int
    cap: int
    """Cells of a layer on average."""
    cells: tuple[int, ...]
    """Cells of each layer."""
    kv_pages: int
    kv_tokens: int
    expert_bytes: int
    kv_bytes: int
    references: int
    """Experts that the trace's steps needed, over all steps and layers."""
    expert_misses: float
    """Predicted for the trace, first sights left out."""
    link_bytes: int
    """That experts cross the link with, predicted for the trace, first sights included."""
    kv_misses: float
    miss_s: float
    """What they cost."""
    step_s: float | None
    """Predicted time of a decode step on the trace; None without such steps or costs."""
    tokens_per_s: float | None
    """Predicted, prefill steps included; None without costs."""
    working_sets: tuple[WorkingSet, ...]
    """For everybody, then for each user: cells of each layer with which at most `epsilon` of the
    warm references miss."""
    epsilon: float
    settled: bool
    """The rule came to rest."""

    def options(self) -> dict[str, Any]:
        """Arguments of LLM, and what `--config FILE` reads. Cells in numbers only where layers have
        different ones: with equal ones `resize` may go on from the plan."""
        found: dict[str, Any] = {"expert_budget": self.expert_bytes, "kv_budget": self.kv_bytes}
        if len(set(self.cells)) > 1:
            found["cells"] = list(self.cells)
        return found


class Planner:
    """What a trace and a machine's costs say about memory.

    model: measured costs; None: only what moves is priced, at link bytes per second, and nothing is
    said of steps' times. link: goes before the measured rate. queue: what transfers pass beside the
    steps of a split; None: they move within. Raises UserError for a trace that is
    of no use, and for costs of another model or dtype, or of experts of another size.
    """

    @user_errors(TraceError)
    def __init__(
        self,
        trace: Trace,
        model: CostModel | None,
        link: float | None = None,
        queue: Link | None = None,
    ):
        self.trace, self.model, self.link, self.queue = trace, model, link, queue
        self.spec: Spec = spec_of(trace.header)
        self.pages_per_user = max((len(turn.pages) for turn in turns_of(trace)), default=0)
        if not self.pages_per_user:
            raise UserError(
                f"no request ends in the trace {trace.directory}, so it says nothing about KV"
            )
        if len(self.spec.version_bytes) > 1:
            raise UserError(
                f"the trace {trace.directory} mixes {' and '.join(self.spec.version_bytes)}, whose "
                "cells differ in size and whose misses in price; a plan is of one version: record "
                "the workload with --precision of one, its routing is what counts"
            )
        if model is not None and (reason := _misfit(trace, self.spec, model)):
            raise UserError(f"the costs do not fit the trace {trace.directory}: {reason}")

    @user_errors()
    def split(
        self,
        memory: int,
        *,
        cells: str = "uniform",
        kv_overflow: str = "swap",
        epsilon: float = EPSILON,
    ) -> PlannedSplit:
        """The split of so many bytes by WiSP's configurator, and what the trace's steps take then.
        cells: how the experts' slots are shared over layers. epsilon: in [0, 1], the warm miss rate
        that is small enough for a working set. Raises UserError for a memory that is too small,
        with what is needed."""
        division = self._division(memory)
        costs = self._miss_costs(kv_overflow)
        prediction = None
        found = configure(turns_of(self.trace), division, costs, allocation=cells)
        if self.model is not None:
            prediction = self._predict(self.model, found.cells.tolist())
        curves, (sizes,) = trace_curves(self.trace), self.spec.link_bytes.values()
        moved = curves.misses[np.arange(self.spec.layers), found.cells] * sizes
        slot = division.unit
        step_s = np.nan if prediction is None else prediction.mean_s("decode")
        return PlannedSplit(
            memory=division.total_bytes,
            slot_bytes=slot,
            cap=found.cap,
            cells=tuple(found.cells.tolist()),
            kv_pages=found.kv_pages,
            kv_tokens=found.kv_pages * self.spec.page_tokens,
            expert_bytes=int(found.cells.sum()) * slot,
            kv_bytes=found.kv_pages // division.unit_pages * slot,
            references=int(curves.references.sum()),
            expert_misses=found.expert_misses,
            link_bytes=int(moved.sum()),
            kv_misses=found.kv_misses,
            miss_s=found.seconds,
            step_s=None if np.isnan(step_s) else step_s,
            tokens_per_s=None if prediction is None else prediction.tokens_per_s,
            working_sets=tuple(working_sets(self.trace, epsilon)),
            epsilon=epsilon,
            settled=found.settled,
        )

    @user_errors()
    def timeline(self, split: PlannedSplit) -> list[TimelineEvent]:
        """What the trace's steps do when with a split. Raises UserError without measured costs."""
        model = self._measured()
        return list(self._predict(model, split.cells, draw=True).events)

    @user_errors()
    def memory_for(self, users: int, tpot_s: float) -> Capacity:
        """The least memory with which so many users at once get a token every tpot_s seconds."""
        if users < 1:
            raise UserError(f"users must be at least 1, got {users}")
        # Only its sizes count, so any memory does that holds KV.
        division, decode = self._division(1 << 62), self._decode_model(users)
        pages = self.pages_per_user
        return memory_for(decode, division, users=users, tpot_s=tpot_s, pages_per_user=pages)

    @user_errors()
    def users_for(self, memory: int, tpot_s: float) -> Capacity:
        """The most users at once that get a token every tpot_s seconds from so many bytes."""
        decode, division = self._decode_model(None), self._division(memory)
        return users_for(decode, division, tpot_s=tpot_s, pages_per_user=self.pages_per_user)

    # ---- pieces

    def _predict(self, model: CostModel, cells: Sequence[int], *, draw: bool = False) -> Prediction:
        return predict(self.trace, model, link=self.queue, draw=draw, cells=cells, driver="device")

    def _miss_costs(self, kv_overflow: str) -> MissCosts:
        if self.link is not None:
            if kv_overflow != "swap":
                raise UserError("a link's rate does not say what computing KV again costs; --costs")
            return link_costs(self.spec, self.link)
        return weighed(self._measured().costs(), self.spec, kv_overflow)

    def _measured(self) -> CostModel:
        if self.model is None:
            raise UserError("times of steps need measured costs: `moejax calibrate`, or --costs")
        return self.model

    def _division(self, memory: int) -> Division:
        slot = self.spec.slot_bytes or 1
        if memory < slot:
            raise UserError(f"{memory} bytes are less than one slot, which has {slot}")
        return division_of(dataclasses.replace(self.spec, budget_bytes=memory))

    def _decode_model(self, users: int | None) -> DecodeModel:
        step_s, miss_s = self._measured().costs().step_s, self._miss_costs("swap").expert_s
        return decode_model(self.trace, step_s=step_s, miss_s=miss_s, users=users)


def weighed(costs: Costs, spec: Spec, kv_overflow: str) -> MissCosts:
    """What misses cost. Raises UserError where that of an expert is nothing."""
    found = miss_costs(costs, spec, kv_overflow)
    if found.expert_s <= 0:
        raise UserError(
            "the measured costs say that a missing expert costs nothing, so there is nothing to "
            "weigh; measure them again on a quiet machine (`moejax calibrate MODEL --force`), or "
            "leave out budget; a plan can take --link"
        )
    return found


@user_errors(TraceError)
def open_trace(directory: str | os.PathLike[str]) -> Trace:
    """Raises UserError for what is no trace."""
    return read_trace(directory)


def costs_of_trace(trace: Trace, path: str | os.PathLike[str] | None = None) -> CostModel:
    """The costs in a file; None: those that were measured on this machine for the trace's model,
    device, dtype, driver and version, with its start-up shapes before others, the newest of them.

    Raises UserError where there are none, and as load_cost_model. Costs in a file that is named may
    be of another device than the trace's: what a trace says holds for any.
    """
    if path is not None:
        return load_cost_model(path)
    header = trace.header
    ran = {**header.spec, "device": header.machine.get("device")}
    others = {n: ran[n] for n in ("device", "dtype", "driver") if ran.get(n) is not None}
    wanted = {"model": header.config_digest, "machine": platform.node(), **others}
    found = []
    for file in sorted((cache_root() / "costs").glob("*.json")):
        about = {}  # nobody's if it cannot be read, which is for who needs it to say
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = dict(json.loads(file.read_text())["about"])
        if all(about.get(name) == value for name, value in wanted.items()):
            same = about.get("shapes") == header.spec.get("shapes")
            found.append((same, str(about.get("created", "")), file))
    reasons: list[str] = []
    for _, _, file in sorted(found, reverse=True):
        model = load_cost_model(file)
        if not (reason := _misfit(trace, spec_of(header), model)):
            return model
        reasons.append(f"; {file} does not fit: {reason}")
    said = ", ".join(f"{name} {value}" for name, value in others.items())
    raise UserError(
        f"no costs of the trace's model ({said}) were measured on this machine: run `moejax "
        "calibrate MODEL` with the options of the run, or name a file with --costs"
        + "".join(reasons)
    )


def _misfit(trace: Trace, spec: Spec, model: CostModel) -> str:
    """Why costs are not those of a trace's steps, empty where they may be. Costs that do not say
    what they are of (`about`) are taken at their figures."""
    header, about = trace.header, model.about
    sizes = next(iter(spec.link_bytes.values()))
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
        said = ", ".join(map(str, np.unique(sizes)))
        return f"their experts have {model.expert_bytes} bytes over the link, the trace's {said}"
    return ""
