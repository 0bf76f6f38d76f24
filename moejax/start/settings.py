"""Options whose names have become what they stand for: policies, budgets, precision, ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from host_offload.control.interface import Policy
from host_offload.control.rules import check_policies, check_search
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom, ResidentHeadroom
from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.placement.names import with_placement
from host_offload.policies.precision.names import Precision, precision_of
from host_offload.policies.prefetch.names import with_prefetch
from host_offload.sizing.cell_allocation import ALLOCATIONS
from moejax.checkpoints.versions import check_quantizer
from moejax.errors import UserError, user_errors
from moejax.start.options import Options
from moejax.start.routing import check_routing
from moejax.start.second import check_places, placement_of
from moejax.start.tiers import PACKED_AS, Tiers, tiers_of_options
from moejax.traces.tracer import check_trace
from pallas_kernels import parse_ops
from pallas_kernels.option_text import parse_option, unknown

BUDGET = ("fixed", "mv_wsa")
"""Names of budget=: as memory, expert_budget and kv_budget say; by WiSP's configurator."""

RESIZE: dict[str, Callable[[BudgetOptions], tuple[Policy, ...]]] = {
    "none": lambda budgets: budgets.live_cells(),
    "peak_headroom": lambda budgets: (PeakHeadroom(),),
    "mv_wsa": lambda budgets: (
        MvWsa(
            allocation=budgets.cells,
            kv_miss=budgets.options.kv_overflow,
            trace=budgets.budget_trace,
        ),
    ),
    "joint": lambda budgets: (JointBudget(),),
}
"""Names of resize= → the policies that move slots while requests run."""


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """What `budget=`, `resize=` and `cells=` came to."""

    options: Options
    cells: str = "uniform"
    """One of ALLOCATIONS; uniform where numbers are given."""
    budget_trace: str | None = None
    """By which budget= decides; None: the sizes of the options do."""
    cells_trace: str | None = None
    given_cells: tuple[int, ...] | None = None
    """Cells of each layer, in numbers."""

    def policies(self, precision: Precision | None = None) -> tuple[Policy, ...]:
        """The precision's policies and those that move slots. Raises UserError for a resize that
        the precision forbids."""
        resize = self.options.resize
        if precision is None or not precision.mixed or resize == "none":
            return *(() if precision is None else precision.policies), *RESIZE[resize](self)
        if reason := _why_not(resize, precision):
            raise UserError(f"resize {resize} and precision {precision.name}: {reason}")
        assert precision.policy is not None
        return dataclasses.replace(precision.policy, resized=True), ResidentHeadroom()

    def live_cells(self) -> tuple[Policy, ...]:
        """By live curves, where no trace says how cells are shared."""
        known = self.cells == "uniform" or self.cells_trace or self.budget_trace
        return () if known else (LayerCells(allocation=self.cells),)

    def stats(self) -> dict[str, Any]:
        """Plain data."""
        budget = "fixed" if self.budget_trace is None else "mv_wsa"
        return {"budget": budget, "resize": self.options.resize, "cells": self.cells}


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


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that can be known of options without a model."""

    options: Options
    precision: Precision
    budgets: BudgetOptions
    eviction: str
    """The name of what decides eviction."""
    policies: tuple[Policy, ...]
    """All of them: eviction's, prefetch's, those given, precision's and those that move slots."""
    ops: Mapping[str, str]
    trace_arrays: frozenset[str]
    """What the trace has beside the rest."""
    tiers: Tiers | None = None
    """Where residents are, with driver="stream"; None: none is packed."""

    placement: str | None = None
    """Its name and all that options say of its costs; None: there is none."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that the store needs."""
        packed = () if self.tiers is None else (PACKED_AS,)
        return *self.precision.versions, *packed

    @property
    def needs_costs(self) -> bool:
        """Costs decide something, so they are measured where none are kept."""
        asked = any("costs" in policy.needs for policy in self.policies)
        return asked or self.budgets.budget_trace is not None


def settings_of(options: Options) -> Settings:
    """Raises UserError for unknown names, for what does not go together, and for a trace that could
    not be written."""
    budgets = parse_budget_options(options)
    precision = parse_precision(options)
    others = budgets.policies(precision)
    with user_errors():
        given = with_prefetch(options.prefetch, options.policies)
        given = with_placement(placement := placement_of(options), given)
        eviction, policies = with_eviction(options.eviction, given)
        policies = *policies, *others
        check_policies(policies, options.driver)
        check_search(policies, options.driver, len(precision.versions))
    check_places(options, policies, precision)
    check_routing(options, policies)
    with user_errors():
        ops = parse_ops(options.ops)
    arrays = check_trace(options.trace, options.trace_arrays)
    tiers = tiers_of_options(options, precision)
    return Settings(options, precision, budgets, eviction, policies, ops, arrays, tiers, placement)


def parse_budget_options(options: Options) -> BudgetOptions:
    """Raises UserError for unknown names and what does not go together."""
    fixed = [n for n in ("expert_budget", "kv_budget") if getattr(options, n) is not None]
    name, budget_trace = _name_and_path("budget", options.budget, BUDGET)
    given, resize, cells = None, options.resize, options.cells
    if not isinstance(cells, str) or cells[:1].isdigit():
        cells = cells.split(",") if isinstance(cells, str) else cells
        try:
            given = tuple(int(n) for n in cells)
        except (TypeError, ValueError) as error:
            raise UserError(f"cells are a name or a whole number a layer, not {cells!r}") from error
        cells = "uniform"
    rule, cells_trace = _name_and_path("cells", cells, ALLOCATIONS)
    if resize not in RESIZE:
        raise UserError(unknown("resize", resize, RESIZE))
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
    return BudgetOptions(options, rule, budget_trace, cells_trace, given)


def _name_and_path(option: str, value: str, known: Sequence[str]) -> tuple[str, str | None]:
    with user_errors():
        name, path, _ = parse_option(option, value, {key: {} for key in known}, paths=known)
    return name, path


def parse_precision(options: Options) -> Precision:
    """precision_of, for users: raises UserError, also for a quantizer that does not exist. A
    Precision is taken as it is, without hi, lo, interval and hi_share. With two versions layers
    have no cells of their own that budget and cells could move."""
    check_quantizer(options.quantizer)
    parts = {name: getattr(options, name) for name in ("hi", "lo", "interval", "hi_share")}
    if isinstance(options.precision, Precision):
        for name, value in parts.items():
            if value is not None:
                raise UserError(f"{name} is a part of the Precision that is given; leave it out")
        found = options.precision
    else:
        with user_errors():
            found = precision_of(options.precision, **parts, seed=options.seed)
    if found.mixed and (options.budget, options.cells) != ("fixed", "uniform"):
        where = (
            "cuts each layer's cells of both versions once, at the start"
            if found.paged
            else "keeps every expert resident in cells that layers share"
        )
        raise UserError(
            f"precision {found.name} {where}, so budget and cells say nothing; leave them out"
        )
    return found
