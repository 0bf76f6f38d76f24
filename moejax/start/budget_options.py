"""Budgets by name: where the line between experts and KV is, whether it moves, and how the cells
are shared over layers (docs/memory.md)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from host_offload.control.interface import Costs, Policy
from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import KV_SHARE, Budget
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.policies.budget.resident_headroom import ResidentHeadroom
from host_offload.policies.precision.names import Precision
from host_offload.sizing.cell_allocation import ALLOCATIONS, allocate
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.miss_curves import trace_curves
from host_offload.sizing.split import division_of, miss_costs
from host_offload.traces.reader import Trace, TraceError, read_trace
from moejax.engine.control import spec_of_engine
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.errors import UserError
from moejax.models.model_config import config_digest
from moejax.start.build import Limits
from moejax.start.remembered import remembered

log = logging.getLogger("moejax")

BUDGET = ("fixed", "mv_wsa")
"""Names of budget=: as memory, expert_budget and kv_budget say; by WiSP's configurator."""

RESIZE: dict[str, Callable[[BudgetOptions], tuple[Policy, ...]]] = {
    "none": lambda options: options.live_cells(),
    "peak_headroom": lambda options: (PeakHeadroom(),),
    "mv_wsa": lambda options: (
        MvWsa(allocation=options.cells, kv_miss=options.kv_overflow, trace=options.budget_trace),
    ),
    "joint": lambda options: (JointBudget(),),
}
"""Names of resize= → the policies that move slots while requests run."""


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """What `budget=`, `resize=` and `cells=` came to."""

    budget: str = "fixed"
    resize: str = "none"
    cells: str = "uniform"
    budget_trace: str | None = None
    cells_trace: str | None = None
    given_cells: tuple[int, ...] | None = None
    """Cells of each layer, in numbers."""
    kv_overflow: str = "swap"
    split_given: bool = False
    """expert_budget or kv_budget says the split."""

    def policies(self, precision: Precision | None = None) -> tuple[Policy, ...]:
        """The precision's policies and those that move slots. Raises UserError for a resize that
        the precision forbids."""
        if precision is None or not precision.mixed or self.resize == "none":
            return *(() if precision is None else precision.policies), *RESIZE[self.resize](self)
        if reason := _why_not(self.resize, precision):
            raise UserError(f"resize {self.resize} and precision {precision.name}: {reason}")
        assert precision.policy is not None
        return dataclasses.replace(precision.policy, resized=True), ResidentHeadroom()

    def live_cells(self) -> tuple[Policy, ...]:
        """By live curves, where no trace says how cells are shared."""
        known = self.cells == "uniform" or self.cells_trace or self.budget_trace
        return () if known else (LayerCells(allocation=self.cells),)

    def stats(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in ("budget", "resize", "cells")}


def _why_not(resize: str, precision: Precision) -> str:
    """Why slots cannot move with two versions; empty where they can."""
    if precision.paged:
        return "cells of two versions are laid out once, at the start; leave out resize, or paged"
    if precision.policy is None:
        return "its versions are fixed, so experts have no slot to give; leave out resize"
    if precision.hi_share is not None:
        return "hi_share fixes how many experts are high, and with them the slots; leave one out"
    if resize != "peak_headroom":
        return (
            "it weighs the misses of experts, and where every expert is resident nothing is "
            "missed; use resize=peak_headroom"
        )
    return ""


def parse_budget_options(
    budget: str, resize: str, cells: str | Sequence[int], limits: Limits
) -> BudgetOptions:
    """Raises UserError for unknown names and what does not go together."""
    fixed = [n for n in ("expert_budget", "kv_budget") if getattr(limits, n) is not None]
    name, budget_trace = _name_and_path("budget", budget, BUDGET)
    given = None
    if not isinstance(cells, str):
        given = _numbers(cells)
        cells = "uniform"
    elif cells and cells[0].isdigit():
        given = _numbers(cells.split(","))
        cells = "uniform"
    rule, cells_trace = _name_and_path("cells", cells, ALLOCATIONS)
    if resize not in RESIZE:
        raise UserError(f"unknown resize {resize!r}; known: {', '.join(RESIZE)}")
    if name == "fixed" and budget_trace:
        raise UserError("budget fixed needs no trace; write budget=mv_wsa=TRACE, or leave it out")
    if name == "mv_wsa" and not budget_trace:
        raise UserError(
            "budget mv_wsa needs a trace of the workload: mv_wsa=TRACE (see `moejax generate "
            "--trace`); without one, resize=mv_wsa finds the split while requests run"
        )
    if name == "mv_wsa" and fixed:
        raise UserError(f"budget mv_wsa decides the split; leave out {' and '.join(fixed)}")
    if name == "mv_wsa" and cells_trace:
        raise UserError(
            f"budget mv_wsa shares its cells by its own trace; leave out ={cells_trace} of cells"
        )
    if rule == "uniform" and cells_trace:
        raise UserError("cells uniform needs no trace; leave it out")
    if resize in ("peak_headroom", "joint") and rule != "uniform":
        raise UserError(
            f"resize {resize} gives every layer as many cells; leave out cells {rule} or take "
            f"resize=mv_wsa"
        )
    if given is not None and (name == "mv_wsa" or resize != "none"):
        raise UserError(
            "cells in numbers stay as they are; leave out budget and resize, or give cells (those "
            "in a file of options too) a name: cells=uniform"
        )
    overflow = limits.kv_overflow
    return BudgetOptions(
        *(name, resize, rule, budget_trace, cells_trace, given, overflow), split_given=bool(fixed)
    )


def _name_and_path(option: str, value: str, known: Sequence[str]) -> tuple[str, str | None]:
    name, _, path = value.partition("=")
    if name not in known:
        raise UserError(f"unknown {option} {name!r}; known: {', '.join(known)}")
    return name, path or None


def _numbers(cells: Sequence[Any]) -> tuple[int, ...]:
    try:
        numbers = tuple(int(n) for n in cells)
    except (TypeError, ValueError) as error:
        raise UserError(f"cells are a name or a whole number a layer, not {cells!r}") from error
    return numbers


def start_budget(engine: Engine, options: BudgetOptions, budget: Budget) -> Budget:
    """Sets the split that an engine starts with, where a trace or numbers say it, or a workload is
    remembered; returns the budget as it is then, with a note of what was decided. Raises UserError
    for a trace that is of no use; one that is only remembered is noted then."""
    arena = engine.scheduler.arena
    if notes := _set_start(engine, options) or _by_rule(engine, options, budget):
        budget = dataclasses.replace(
            budget,
            expert_slots=sum(cells_of(arena)),
            kv_slots=arena.count(SlotClass.KV),
            pages=arena.pages,
            notes=(*budget.notes, *notes),
        )
    for note in budget.notes:
        # What the user asked for and does not get must be seen without asking for a log.
        log.log(logging.WARNING if ", cut from" in note else logging.INFO, note)
    return budget


def _set_start(engine: Engine, options: BudgetOptions) -> tuple[str, ...]:
    arena, runner = engine.scheduler.arena, engine.runner
    had, kv_slots = cells_of(arena), arena.count(SlotClass.KV)
    if options.given_cells is not None:
        if len(options.given_cells) != len(had) or sum(options.given_cells) > sum(had):
            raise UserError(
                f"cells: {len(options.given_cells)} numbers, {sum(options.given_cells)} in all; "
                f"the model has {len(had)} layers with experts and the budget {sum(had)} cells"
            )
        _set(engine, options.given_cells, kv_slots)
        return (f"cells of each layer: {_short(options.given_cells)}, as given",)
    if options.budget_trace is not None:
        from moejax.costs.calibration import costs_for  # which runs engines

        trace = _trace(options.budget_trace, engine)
        costs = costs_for(runner)
        runner.grant_cells(arena.cell_row)  # measuring leaves none
        return ("budget mv_wsa: " + _configured(engine, options, trace, costs),)
    if options.cells_trace is not None:
        trace = _trace(options.cells_trace, engine)
        curves = trace_curves(trace, kind="decode")
        found = allocate(options.cells, curves.misses, sum(had))
        _set(engine, found.cells.tolist(), kv_slots)
        return (
            f"cells of each layer: {_short(found.cells.tolist())}, {options.cells} by the trace, "
            f"which would have missed {found.misses:.0f} of {int(curves.references.sum())}",
        )
    return ()


def _by_rule(engine: Engine, options: BudgetOptions, budget: Budget) -> tuple[str, ...]:
    """A note of who decides the split where not everything fits and nobody was asked: the
    configurator, by the workload that is remembered for the model and by costs that were measured
    before; without either, resolve_budget's rule."""
    runner = engine.runner
    asked = options.budget != "fixed" or options.cells != "uniform" or options.given_cells
    if not budget.cut or asked or options.split_given or len(runner.layout.records) > 1:
        return ()
    from moejax.costs.calibration import identity, kept_cost_model

    rule = f"split: KV keeps at least 1/{KV_SHARE} or one sequence, experts the rest"
    try:
        directory = remembered(config_digest(runner.config))
        if directory is None:
            return (f"{rule}; no workload is remembered (moejax plan --trace T --remember)",)
        trace = _trace(directory, engine)
        if (kept := kept_cost_model(identity(runner))) is None:
            raise UserError("costs of this start were not measured: `moejax calibrate`")
        how = _configured(engine, options, trace, kept.costs())
    except UserError as error:
        log.warning("the workload that is remembered does not split the memory: %s", error)
        return (f"{rule}; the workload that is remembered was of no use: {error}",)
    return (f"split: by the remembered workload {directory}: {how}",)


def _configured(engine: Engine, options: BudgetOptions, trace: Trace, costs: Costs) -> str:
    """Sets the split that the configurator finds; says what it is. Raises UserError."""
    length = engine.scheduler.max_model_len
    spec = spec_of_engine(engine.runner, max_model_len=length, seed=engine.seed)
    prices = miss_costs(costs, spec, options.kv_overflow)
    if prices.expert_s <= 0:
        raise UserError(
            "the measured costs say that a missing expert costs nothing, so there is nothing "
            "to weigh; leave out budget, or measure them again on a quiet machine: `moejax "
            "calibrate MODEL --force`"
        )
    try:
        found = configure(turns_of(trace), division_of(spec), prices, allocation=options.cells)
    except ValueError as error:
        raise UserError(f"{trace.directory}: {error}") from error
    pages_per_slot = engine.scheduler.arena.layout.pages_per_slot
    _set(engine, found.cells.tolist(), found.kv_pages // pages_per_slot)
    return (
        f"{found.cap} cells a layer ({_short(found.cells.tolist())}), "
        f"{found.kv_pages} KV pages; predicted for the trace {found.expert_misses:.0f} expert "
        f"and {found.kv_misses:.0f} KV misses, {found.seconds:.3g} s"
        + ("" if found.settled else "; the rule did not come to rest")
    )


def _set(engine: Engine, cells: Sequence[int], kv_slots: int) -> None:
    if len(engine.runner.layout.records) > 1:
        raise UserError(
            "with two versions of the experts in memory slots do not move; leave out budget and "
            "cells, or precision"
        )
    try:
        engine.set_budget(list(cells), kv_slots)
    except ValueError as error:
        raise UserError(f"the split cannot be set: {error}") from error


def _trace(path: str, engine: Engine) -> Trace:
    layers, experts = engine.runner.tables.address.shape
    try:
        trace = read_trace(path)
    except TraceError as error:
        raise UserError(str(error)) from error
    if (trace.header.layers, trace.header.experts) != (layers, experts):
        raise UserError(
            f"{path} is of another model: {trace.header.layers} layers of {trace.header.experts} "
            f"experts, this one has {layers} of {experts}"
        )
    return trace


def _short(cells: Sequence[int]) -> str:
    low, high = min(cells), max(cells)
    if low == high:
        return f"{low} each"
    return ", ".join(map(str, cells)) if len(cells) <= 8 else f"{low} to {high}"
