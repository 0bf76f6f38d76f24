"""The split between experts and KV that an engine starts with, where a trace or numbers say it, or
a workload is remembered."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from host_offload.control.interface import Costs, Spec
from host_offload.memory.budget import KV_SHARE, Budget
from host_offload.sizing.cell_allocation import allocate
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.miss_curves import trace_curves
from host_offload.sizing.split import division_of, miss_costs
from host_offload.traces.reader import Trace, TraceError, read_trace
from moejax.costs.store import StepSpec, identity, kept_cost_model
from moejax.engine.resize import check_grant
from moejax.errors import UserError
from moejax.start.budget_options import BudgetOptions
from moejax.start.remembered import remembered
from moejax.traces.tracer import config_digest

log = logging.getLogger("moejax")


class Split(NamedTuple):
    cells: tuple[int, ...]
    """Cells of each layer."""
    kv_slots: int
    note: str
    """Who decided it and what it is, for people."""


def start_split(
    options: BudgetOptions,
    budget: Budget,
    had: Sequence[int],
    spec: Spec,
    steps: StepSpec,
    costs: Costs | None,
) -> Split | None:
    """The split that options, a trace or a remembered workload ask for; None: the budget's.

    had: cells of each layer by the budget alone. costs: needed with a trace for `budget`. Raises
    UserError for a trace that is of no use; one that is only remembered is noted then.
    """
    found = _asked(options, budget, had, spec, costs)
    if found is None:
        return _by_rule(options, budget, had, spec, steps)
    return found


def check_split(spec: Spec, steps: StepSpec, cells: Sequence[int], kv_slots: int) -> None:
    """Raises UserError for cells and KV slots that an arena cannot have."""
    if len(steps.layout.records) > 1:
        raise UserError(
            "with two versions of the experts in memory slots do not move; leave out budget and "
            "cells, or precision"
        )
    slots = spec.budget_bytes // steps.layout.slot_bytes
    try:
        check_grant((spec.layers, spec.cell_bound), slots, list(cells), kv_slots)
    except ValueError as error:
        raise UserError(f"the split cannot be set: {error}") from error


def _asked(
    options: BudgetOptions, budget: Budget, had: Sequence[int], spec: Spec, costs: Costs | None
) -> Split | None:
    if (given := options.given_cells) is not None:
        if len(given) != len(had) or sum(given) > sum(had):
            raise UserError(
                f"cells: {len(given)} numbers, {sum(given)} in all; "
                f"the model has {len(had)} layers with experts and the budget {sum(had)} cells"
            )
        return Split(given, budget.kv_slots, f"cells of each layer: {_short(given)}, as given")
    if options.budget_trace is not None:
        assert costs is not None
        split = _configured(options, _trace(options.budget_trace, spec), spec, costs)
        return split._replace(note="budget mv_wsa: " + split.note)
    if options.cells_trace is not None:
        curves = trace_curves(_trace(options.cells_trace, spec), kind="decode")
        found = allocate(options.cells, curves.misses, sum(had))
        cells = tuple(found.cells.tolist())
        note = (
            f"cells of each layer: {_short(cells)}, {options.cells} by the trace, "
            f"which would have missed {found.misses:.0f} of {int(curves.references.sum())}"
        )
        return Split(cells, budget.kv_slots, note)
    return None


def _by_rule(
    options: BudgetOptions, budget: Budget, had: Sequence[int], spec: Spec, steps: StepSpec
) -> Split | None:
    """Who decides where not everything fits and nobody was asked: the configurator, by the workload
    that is remembered for the model and by costs that were measured before; without either,
    resolve_budget's rule."""
    asked = options.budget != "fixed" or options.cells != "uniform"
    if not budget.cut or asked or options.split_given or len(steps.layout.records) > 1:
        return None
    rule = f"split: KV keeps at least 1/{KV_SHARE} or one sequence, experts the rest"
    as_it_is = Split(tuple(had), budget.kv_slots, rule)
    try:
        directory = remembered(config_digest(steps.config))
        if directory is None:
            none = "no workload is remembered (moejax plan --trace T --remember)"
            return as_it_is._replace(note=f"{rule}; {none}")
        trace = _trace(directory, spec)
        if (kept := kept_cost_model(identity(steps))) is None:
            raise UserError("costs of this start were not measured: `moejax calibrate`")
        split = _configured(options, trace, spec, kept.costs())
        check_split(spec, steps, split.cells, split.kv_slots)
    except UserError as error:
        log.warning("the workload that is remembered does not split the memory: %s", error)
        note = f"{rule}; the workload that is remembered was of no use: {error}"
        return as_it_is._replace(note=note)
    return split._replace(note=f"split: by the remembered workload {directory}: {split.note}")


def _configured(options: BudgetOptions, trace: Trace, spec: Spec, costs: Costs) -> Split:
    """The split that the configurator finds."""
    prices = miss_costs(costs, spec, options.kv_overflow)
    if prices.expert_s <= 0:
        raise UserError(
            "the measured costs say that a missing expert costs nothing, so there is nothing "
            "to weigh; leave out budget, or measure them again on a quiet machine: `moejax "
            "calibrate MODEL --force`"
        )
    division = division_of(spec)
    try:
        found = configure(turns_of(trace), division, prices, allocation=options.cells)
    except ValueError as error:
        raise UserError(f"{trace.directory}: {error}") from error
    cells = tuple(found.cells.tolist())
    note = (
        f"{found.cap} cells a layer ({_short(cells)}), "
        f"{found.kv_pages} KV pages; predicted for the trace {found.expert_misses:.0f} expert "
        f"and {found.kv_misses:.0f} KV misses, {found.seconds:.3g} s"
        + ("" if found.settled else "; the rule did not come to rest")
    )
    return Split(cells, found.kv_pages // division.unit_pages, note)


def _trace(path: str, spec: Spec) -> Trace:
    try:
        trace = read_trace(path)
    except TraceError as error:
        raise UserError(str(error)) from error
    if (trace.header.layers, trace.header.experts) != (spec.layers, spec.experts):
        raise UserError(
            f"{path} is of another model: {trace.header.layers} layers of {trace.header.experts} "
            f"experts, this one has {spec.layers} of {spec.experts}"
        )
    return trace


def _short(cells: Sequence[int]) -> str:
    low, high = min(cells), max(cells)
    if low == high:
        return f"{low} each"
    return ", ".join(map(str, cells)) if len(cells) <= 8 else f"{low} to {high}"
