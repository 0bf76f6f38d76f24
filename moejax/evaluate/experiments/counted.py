"""Cells without an engine: what budgets come to, what the routing of a run would have moved, and
what that would have taken."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.control.interface import Spec
from host_offload.memory.budget import cells_per_layer
from host_offload.simulate.bounds import in_one_pool, min_transfers, read_references
from host_offload.simulate.prediction import predict
from host_offload.simulate.simulated_engine import SimulatedStep
from host_offload.simulate.simulator import Simulation, simulate, spec_of
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import Trace, TraceError
from host_offload.traces.step_sets import step_set
from moejax.errors import user_errors
from moejax.evaluate.experiments.arms import Arm
from moejax.evaluate.experiments.definition import NO_LINK, Cell, Experiment, Sizes
from moejax.evaluate.experiments.workload import KINDS, Choices, count_columns, transfer_columns
from moejax.sizes import parse_rate


@dataclasses.dataclass(frozen=True)
class Granted:
    """What a budget comes to for an arm."""

    cells: tuple[int, ...]
    """Each layer's."""
    experts: int
    """A layer's experts."""
    expert_bytes: int
    """What the cells take."""
    learned_bytes: int = 0
    """What the arm learned takes, which the budget pays for."""
    moves_cells: bool = False

    @property
    def columns(self) -> dict[str, int]:
        """Columns of a record."""
        found = dict(vars(self))
        cells = found.pop("cells")
        return {"cells_least": min(cells), "cells_most": max(cells), **found}


@dataclasses.dataclass(frozen=True)
class Terms:
    """What budgets and policies come to in some cells, with an engine or without."""

    experiment: Experiment
    sizes: Sizes
    spec: Spec
    """What policies are told by an engine of all budgets."""
    kv_bytes: int
    router: np.ndarray | None = None
    """float32[L, D, E]; None: routing without a model."""
    mixed: Granted | None = None
    """What the budget came to where experts have two versions."""

    def grant(self, cell: Cell, arm: Arm) -> Granted:
        """The cells of a budget, as even as they can be over the layers."""
        if self.mixed is not None:
            return self.mixed
        slots = self.sizes.slots(cell.budget, arm, self.experiment.equal)
        cells = cells_per_layer(slots, self.spec.layers, self.spec.experts)
        nbytes, learned = slots * self.sizes.slot_bytes, arm.learned_bytes(self.spec)
        return Granted(cells, self.spec.experts, nbytes, learned, arm.moves_cells or arm.pooled)

    def spec_of(self, cell: Cell, arm: Arm) -> Spec:
        """What the policies of a cell are told: an arena of this budget and the KV, not the largest
        one of the grid."""
        needs_router = any("router" in policy.needs for policy in arm.policies)
        held = self.grant(cell, arm).expert_bytes + self.kv_bytes
        return dataclasses.replace(
            self.spec,
            budget_bytes=self.spec.budget_bytes if cell.mode == "priced" else held,
            seed=cell.seed,
            router=self.router if needs_router else None,
        )


def terms_of_trace(experiment: Experiment, trace: Trace) -> Terms:
    """The terms of routing without a model. Raises UserError for a trace that does not say what
    policies are told."""
    with user_errors(TraceError):
        spec = spec_of(trace.header)
    size = max(int(np.max(sizes)) for sizes in spec.version_bytes.values())
    kv_bytes = max(spec.budget_bytes - spec.layers * spec.experts * size, 0)
    return Terms(experiment, Sizes(spec, size), spec, kv_bytes)


def count_cell(
    terms: Terms, cell: Cell, arm: Arm, trace: Trace, costs: CostModel | None
) -> dict[str, Any]:
    """The columns of a cell of mode simulated, predicted or bound, with the routing of `trace`:
    counts that the engine has, and what counting took (`wall_s`), or by `costs` its times."""
    if cell.mode == "bound":
        return _bound(terms, cell, arm, trace)
    granted, spec = terms.grant(cell, arm), terms.spec_of(cell, arm)
    asked: dict[str, Any] = {
        "policies": arm.policies_in(trace),
        "cells": list(granted.cells),
        "driver": cell.driver,
        "spec": spec,
    }
    if cell.mode == "simulated":
        choices, began = Choices(granted.cells), time.perf_counter()

        def watch(step: SimulatedStep) -> None:
            active = step.hits + step.fills + step.read_through
            choices.see(str(step.kind), active, step.fills, step.staged)

        found = simulate(trace, **asked, watcher=watch)
        others = transfer_columns({} if found.control is None else found.control["transfers"])
        others |= {"eviction_choices": choices.count}
        timed: dict[str, Any] = {"wall_s": time.perf_counter() - began}
        return {**granted.columns, **_counts(found, spec), **others, **timed}
    assert costs is not None
    link = None if cell.link_rate == NO_LINK else Link(parse_rate(cell.link_rate))
    told = predict(trace, costs, link=link, **asked)
    seconds = {kind: told.seconds[told.of_kind(kind)] for kind in KINDS}
    decode, control = seconds["decode"], told.simulation.control
    return {
        **granted.columns,
        **_counts(told.simulation, spec),
        **transfer_columns({} if control is None else control["transfers"]),
        **{f"{kind}_s": float(s.sum()) for kind, s in seconds.items()},
        "ttft_s": float(seconds["prefill"].sum()),
        "tpot_p50_s": float(np.percentile(decode, 50)) if decode.size else None,
        "tpot_p99_s": float(np.percentile(decode, 99)) if decode.size else None,
        "tokens_per_s": told.tokens_per_s,
        "stall_share": told.stall_share,
        "stall_bound_share": told.stall_bound_share,
    }


def _link_bytes(spec: Spec) -> np.ndarray:
    """int64[L]: what an expert of each layer moves over the link."""
    return next(iter(spec.link_bytes.values()))


def _counts(found: Simulation, spec: Spec) -> dict[str, int]:
    columns: dict[str, int] = {}
    for kind in KINDS:
        steps = found.of_kind(kind)
        names = "hits", "fills", "read_through", "staged"
        layers = [getattr(found, name)[steps].sum(axis=0) for name in names]
        nbytes = [layer @ _link_bytes(spec) for layer in layers[1:]]
        columns |= count_columns(kind, steps.sum(), [layer.sum() for layer in layers], nbytes)
    return columns


def _bound(terms: Terms, cell: Cell, arm: Arm, trace: Trace) -> dict[str, Any]:
    """The columns of MIN, the fewest experts that any policy can move in the decode steps, whatever
    the prefill left; None below the largest step set, where no bound is claimed. `pool_misses`: the
    same for policies that move cells between layers."""
    granted, references = terms.grant(cell, arm), read_references(trace, "decode")
    try:
        moved = min_transfers(references, np.array(granted.cells))
        pool = min_transfers(in_one_pool(references), sum(granted.cells))
    except ValueError:
        return {**granted.columns, "decode_misses": None}
    return {
        **granted.columns,
        "decode_misses": int(moved.sum()),
        "decode_bytes": int(moved @ _link_bytes(terms.spec)),
        "pool_misses": int(pool.sum()),
    }


def active_bytes(trace: Trace, sizes: Mapping[str, np.ndarray]) -> float:
    """Bytes of the experts that a decode step computes with, each once: the mean, and what a step
    must read of device memory at least."""
    size, found = next(iter(sizes.values())), []
    for step in trace.step_traces():
        if step.kind == "decode":
            active, _ = step_set(step, trace.header.experts)
            found.append(int(active.sum(axis=tuple(range(1, active.ndim))) @ size))
    return float(np.mean(found)) if found else 0.0
