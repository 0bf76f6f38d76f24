"""Cells without an engine: what the routing of a run would have moved, and would have taken."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Spec
from host_offload.simulate.bounds import in_one_pool, min_transfers, read_references
from host_offload.simulate.prediction import predict
from host_offload.simulate.simulated_engine import SimulatedStep
from host_offload.simulate.simulator import Simulation, simulate
from host_offload.simulate.timeline import Link, TimelineEvent
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.step_sets import step_set
from moejax.evaluate.experiments.bench import Bench, Terms
from moejax.evaluate.experiments.definition import NO_LINK, Cell
from moejax.evaluate.experiments.workload import KINDS, Workload, has_choice, run, transfer_columns
from moejax.sizes import parse_rate
from moejax.traces.timeline import middle_layers
from moejax.traces.tracer import start_trace


def recorded(bench: Bench, workload: Workload, directory: Path) -> Trace:
    """The trace of a workload's routing, which no policy and no budget changes; recorded with all
    cells and LRU where it is not there yet."""
    if directory.exists():
        trace = read_trace(directory)
        if trace.complete:
            return trace
        shutil.rmtree(directory)  # a run that was killed
    engine, plan = bench.engine, bench.plan
    engine.begin_anew(plan.spec, (), plan.cells)
    directory.parent.mkdir(parents=True, exist_ok=True)
    arrays = plan.steps.trace_arrays
    about = {"model": bench.terms.experiment.model, "eviction": "lru", "prefetch": None}
    engine.tracer = start_trace(directory, engine.runner, plan.spec, settings=about, arrays=arrays)
    try:
        run(engine, workload)
        engine.tracer.close()
    finally:
        engine.tracer = None
    return read_trace(directory)


class _Choices:
    """A simulation's watcher that counts where eviction had a choice."""

    def __init__(self, cells: np.ndarray):
        self._cells, self._held = cells, np.zeros(len(cells), np.int64)
        self.count = 0

    def __call__(self, step: SimulatedStep) -> None:
        active = step.hits + step.fills + step.read_through
        self._held += step.fills + step.staged
        if step.kind == "decode":
            self.count += has_choice(active, step.fills, self._cells, self._held)


def simulated(terms: Terms, cell: Cell, trace: Trace) -> dict[str, Any]:
    """The columns of a simulated cell: the counts that the engine has, and what counting took."""
    granted, spec = terms.granted(cell), terms.spec(cell)
    watcher = _Choices(np.array(granted.cells))
    asked, began = _asked(terms, cell, trace), time.perf_counter()
    found = simulate(trace, **asked, watcher=watcher)
    wall_s = time.perf_counter() - began
    return {
        **granted.columns,
        **_counts(found, _link_bytes(spec)),
        "eviction_choices": watcher.count,
        **transfer_columns({} if found.control is None else found.control["transfers"]),
        "wall_s": wall_s,
    }


def predicted(
    terms: Terms, cell: Cell, trace: Trace, costs: CostModel
) -> tuple[dict[str, Any], list[TimelineEvent]]:
    """The columns of a predicted cell: the simulator's counts, and times of the cost model. Over a
    link also what happened in some layers in the middle of the run, cut to their time."""
    link = None if cell.link_rate == NO_LINK else Link(parse_rate(cell.link_rate))
    found = predict(trace, costs, link=link, draw=link is not None, **_asked(terms, cell, trace))
    seconds = {kind: found.seconds[found.of_kind(kind)] for kind in KINDS}
    decode = seconds["decode"]
    columns = {
        **terms.granted(cell).columns,
        **_counts(found.simulation, _link_bytes(terms.spec(cell))),
        **{f"{kind}_s": float(s.sum()) for kind, s in seconds.items()},
        "ttft_s": float(seconds["prefill"].sum()),
        "tpot_p50_s": float(np.percentile(decode, 50)) if decode.size else None,
        "tpot_p99_s": float(np.percentile(decode, 99)) if decode.size else None,
        "tokens_per_s": found.tokens_per_s,
        "stall_share": found.stall_share,
        "stall_bound_share": found.stall_bound_share,
    }
    if link is None:
        return columns, []
    begin, end = middle_layers(found.events)
    shown = [event for event in found.events if event.end > begin and event.begin < end]
    cut = [
        dataclasses.replace(event, begin=max(event.begin, begin), end=min(event.end, end))
        for event in shown
    ]
    return columns, cut


def _asked(terms: Terms, cell: Cell, trace: Trace) -> dict[str, Any]:
    """Arguments of simulate for a cell."""
    return {
        "policies": terms.arms[cell.policy].policies_in(trace),
        "cells": list(terms.granted(cell).cells),
        "driver": cell.driver,
        "spec": terms.spec(cell),
    }


def _link_bytes(spec: Spec) -> np.ndarray:
    """int64[L]: what an expert of each layer moves over the link."""
    return next(iter(spec.link_bytes.values()))


def _counts(found: Simulation, sizes: np.ndarray) -> dict[str, Any]:
    """Columns of what was moved, as of workload.Counter. sizes: int64[L], bytes of an expert."""
    columns: dict[str, Any] = {}
    for kind in KINDS:
        steps = found.of_kind(kind)
        per_layer = {n: getattr(found, n)[steps].sum(axis=0) for n in ("hits", "fills")}
        through, staged = found.read_through[steps].sum(axis=0), found.staged[steps].sum(axis=0)
        moved = {"fill": per_layer["fills"], "read_through": through, "ahead": staged}
        nbytes = {name: int(counts @ sizes) for name, counts in moved.items()}
        columns |= {
            f"{kind}_steps": int(steps.sum()),
            f"{kind}_hits": int(per_layer["hits"].sum()),
            f"{kind}_misses": int(found.misses[steps].sum()),
            f"{kind}_fills": int(per_layer["fills"].sum()),
            f"{kind}_read_through": int(through.sum()),
            f"{kind}_ahead": int(staged.sum()),
            f"{kind}_bytes": sum(nbytes.values()),
            **{f"{kind}_{name}_bytes": count for name, count in nbytes.items()},
        }
    return columns


def bound(terms: Terms, cell: Cell, trace: Trace) -> dict[str, Any] | None:
    """The columns of MIN, the fewest experts that any policy can move in the decode steps, whatever
    the prefill left; None below the largest step set, where no bound is claimed. `pool_misses`: the
    same for policies that move cells between layers."""
    granted, references = terms.granted(cell), read_references(trace, "decode")
    try:
        moved = min_transfers(references, np.array(granted.cells))
        pool = min_transfers(in_one_pool(references), sum(granted.cells))
    except ValueError:
        return None
    return {
        **granted.columns,
        "decode_misses": int(moved.sum()),
        "decode_bytes": int(moved @ _link_bytes(terms.spec(cell))),
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
