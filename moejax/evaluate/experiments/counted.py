"""Counts cells without an engine: what the routing of a run would have moved, and how long that
would have taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.control.interface import Spec
from host_offload.control.paging import PagedSpec
from host_offload.simulate.bounds import in_one_pool, min_transfers, read_references
from host_offload.simulate.prediction import predict, step_work
from host_offload.simulate.simulator import Simulation, simulate
from host_offload.simulate.split_experts import HalfExperts, Prefilled, foresee, play_split
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel, run_costs
from host_offload.traces.reader import Trace
from host_offload.traces.step_sets import in_waves, step_counts, step_set
from moejax.evaluate.experiments.arms import Arm
from moejax.evaluate.experiments.definition import NO_LINK, Cell
from moejax.evaluate.experiments.terms import Terms, grant_columns
from moejax.evaluate.experiments.workload import KINDS, count_columns, transfer_columns
from moejax.sizes import parse_rate
from moejax.start.decide.start_plan import StartPlan


def count_cell(
    terms: Terms, cell: Cell, arm: Arm, trace: Trace, costs: CostModel | None
) -> dict[str, Any]:
    """Returns the columns of a cell of mode simulated, predicted or bound, with the routing of
    `trace`: counts that the engine has, and the time of counting (`wall_s`), or its times by
    `costs`."""
    if cell.mode == "bound":
        return _bound(terms, cell, arm, trace)
    cells, granted = terms.grant(cell.budget, arm)
    spec = terms.spec_for(cell.budget, arm, cell.seed)
    asked: dict[str, Any] = {
        "policies": arm.policies_in(trace),
        "cells": list(cells),
        "driver": cell.driver,
        "spec": spec,
    }
    if cell.mode == "simulated":
        began = time.perf_counter()
        found = simulate(trace, **asked)
        others = transfer_columns({} if found.control is None else found.control["transfers"])
        timed: dict[str, Any] = {"wall_s": time.perf_counter() - began}
        return {**granted, **_counts(found, spec), **others, **timed}
    assert costs is not None
    if arm.halves is not None:
        return {**granted, **_count_halves(spec, np.array(cells), cell, arm.halves, trace, costs)}
    link = None if cell.link_rate == NO_LINK else Link(parse_rate(cell.link_rate))
    told = predict(trace, costs, link=link, **asked)
    seconds = {kind: told.seconds[told.of_kind(kind)] for kind in KINDS}
    decode, control = seconds["decode"], told.simulation.control
    return {
        **granted,
        **_counts(told.simulation, spec),
        **transfer_columns({} if control is None else control["transfers"]),
        **{f"{kind}_s": float(s.sum()) for kind, s in seconds.items()},
        "ttft_s": float(seconds["prefill"].sum()),
        "tpot_p50_s": float(decode.mean()) if decode.size else None,
        "tpot_p99_s": float(np.percentile(decode, 99)) if decode.size else None,
        "tokens_per_s": told.tokens_per_s,
        "stall_share": told.stall_share,
        "stall_bound_share": told.stall_bound_share,
    }


def _count_halves(
    spec: Spec,
    cells: np.ndarray,
    cell: Cell,
    half: HalfExperts,
    trace: Trace,
    costs: CostModel,
) -> dict[str, Any]:
    """Returns the columns of MoEpic's decode steps; prefill steps fill its caches. A hit is of a
    top.

    - `cells`: int64[L], whole experts of each layer.
    """
    assert spec.router is not None, "Terms.spec_for gives it"
    of_run, needed, ahead = run_costs(costs, spec.version_bytes), [], []
    played: list[np.ndarray | Prefilled] = []
    fixed_s = products_s = 0.0
    for step in trace.step_traces():
        if step.kind != "decode":
            active, waves = step_set(step, spec.experts)
            played.append(Prefilled([*in_waves(active, waves)]))
            continue
        assert step.gate_input is not None, "the arm's trace has it"
        (work, rows), routed = step_work(step, costs.chunk), step_counts(step, spec.experts)
        version = np.zeros(routed.shape, np.int64)
        fixed_s += of_run.fixed_cost(work, rows, version).seconds(work)
        products_s += float(of_run.products(routed, version, rows).sum())
        needed.append(routed > 0)
        played.append(needed[-1])
        ahead.append(foresee(step.gate_input, spec.router, spec.top_k))
    steps, uses = len(needed), int(np.sum(needed))
    layer_s, expert_s = fixed_s / steps / spec.layers, products_s / uses
    rate = 1 / costs.link_per_byte if cell.link_rate == NO_LINK else parse_rate(cell.link_rate)
    record = int(_link_bytes(spec).max())
    hidden = layer_s + products_s / steps / spec.layers
    config = half.config(cells, record / rate, hidden)
    link = Link(rate, beside=costs.beside_per_byte)
    given = {"record_bytes": record, "link": link, "layer_s": layer_s, "expert_s": expert_s}
    found = play_split(played, config, predicted=ahead if half.ahead else None, **given)
    seconds, compute = float(found.seconds.sum()), fixed_s + products_s
    counts = steps, found.hits, uses - found.hits, 0, 0, found.bytes
    return {
        **count_columns("prefill", [0] * len(counts)),
        **count_columns("decode", counts),
        **transfer_columns({}),
        "decode_s": seconds,
        "tpot_p50_s": seconds / steps,
        "tpot_p99_s": float(np.percentile(found.seconds, 99)),
        "tokens_per_s": cell.batch * steps / seconds,
        "stall_share": 1 - compute / seconds,
        "top_share": float(config.top.mean()),
    }


VERSION_COLUMNS = (
    *("hi", "lo", "absent", "promotions", "demotions", "deferred"),
    *("promoted_bytes", "demoted_bytes", "budget_bytes", "peak_bytes"),
)
"""Columns of experts in two versions: how many are in which, and the result of transitions."""


def mixed_columns(plan: StartPlan) -> dict[str, Any]:
    """Returns the columns of a start that laid out cells of two versions."""
    experts = plan.spec.experts
    cells = [experts] * plan.spec.layers  # every expert is resident in one of them
    if isinstance(plan.mixed, PagedSpec):
        cells = plan.mixed.cells.sum(axis=1).tolist()
    slots = plan.budget.slots - plan.budget.kv_slots
    return grant_columns(cells, experts, slots * plan.steps.layout.slot_bytes)


def count_mixed(plan: StartPlan, trace: Trace, driver: str) -> dict[str, Any]:
    """Returns the columns of a simulated cell with two versions.

    - `plan`: of a start with both.
    - `trace`: of dense experts. Quantized ones would route a little differently.
    """
    began = time.perf_counter()
    cells = plan.mixed if isinstance(plan.mixed, PagedSpec) else None
    asked: dict[str, Any] = {"spec": plan.spec, "driver": driver, "cells": cells}
    found = simulate(trace, policies=plan.settings.policies, **asked)
    control: Mapping[str, Any] = found.control or {}
    versions = control.get("precision") or {}
    columns = _counts(found, plan.spec)
    assert found.bytes is not None  # the plan says what versions take
    for kind in KINDS:
        columns[f"{kind}_bytes"] = int(found.bytes[found.of_kind(kind)].sum())
    return {
        **mixed_columns(plan),
        **columns,
        **transfer_columns(control.get("transfers") or {}),
        **{name: versions[name] for name in VERSION_COLUMNS if name in versions},
        "wall_s": time.perf_counter() - began,
    }


def _link_bytes(spec: Spec) -> np.ndarray:
    """Returns the bytes that an expert of each layer moves over the link, int64[L]."""
    return next(iter(spec.link_bytes.values()))


def _counts(found: Simulation, spec: Spec) -> dict[str, int]:
    columns: dict[str, int] = {}
    for kind in KINDS:
        steps = found.of_kind(kind)
        names = "hits", "fills", "read_through", "staged"
        layers = [getattr(found, name)[steps].sum(axis=0) for name in names]
        nbytes = sum(layers[1:]) @ _link_bytes(spec)
        columns |= count_columns(kind, [steps.sum(), *(x.sum() for x in layers), nbytes])
    return columns


def _bound(terms: Terms, cell: Cell, arm: Arm, trace: Trace) -> dict[str, Any]:
    """Returns the columns of MIN, the fewest experts that any policy can move in the decode steps,
    whatever the prefill left; None below the largest step set, for which no bound is claimed.
    `pool_misses` is the same for policies that move cells between layers."""
    cells, granted = terms.grant(cell.budget, arm)
    references = read_references(trace, "decode")
    try:
        moved = min_transfers(references, np.array(cells))
        pool = min_transfers(in_one_pool(references), sum(cells))
    except ValueError:
        return {**granted, "decode_misses": None}
    return {
        **granted,
        "decode_misses": int(moved.sum()),
        "decode_bytes": int(moved @ _link_bytes(terms.spec)),
        "pool_misses": int(pool.sum()),
    }
