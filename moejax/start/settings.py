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
from host_offload.policies.eviction.eviction_names import with_eviction
from host_offload.policies.placement.placement_names import with_placement
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.policies.prefetch.prefetch_names import with_prefetch
from host_offload.sizing.cell_allocation import ALLOCATIONS
from moejax.checkpoints.versions import check_quantizer
from moejax.errors import UserError, user_errors
from moejax.start.option_values import Driver
from moejax.start.options import Config
from moejax.start.routing import check_routing
from moejax.start.second import check_places, placement_of
from moejax.start.tiers import PACKED_AS, tiers_of_options
from moejax.traces.tracer import check_trace
from pallas_kernels import parse_ops
from pallas_kernels.option_text import parse_option, unknown

RESIZE: dict[str, Callable[[BudgetOptions], tuple[Policy, ...]]] = {
    "none": lambda budgets: budgets.live_cells(),
    "peak_headroom": lambda budgets: (PeakHeadroom(),),
    "mv_wsa": lambda budgets: (
        MvWsa(
            allocation=budgets.cells,
            kv_miss=budgets.options.memory.kv_overflow,
            trace=budgets.budget_trace,
        ),
    ),
    "joint": lambda budgets: (JointBudget(),),
}
"""Names of resize= → the policies that move slots while requests run."""


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """What `resize=` and `cells=` came to."""

    options: Config
    cells: str = "uniform"
    """One of ALLOCATIONS; uniform where numbers are given."""
    budget_trace: str | None = None
    """By which `split` decides; None: the sizes of the options do."""
    cells_trace: str | None = None
    given_cells: tuple[int, ...] | None = None
    """Cells of each layer, in numbers."""

    def policies(self, precision: Precision | None = None) -> tuple[Policy, ...]:
        """The precision's policies and those that move slots. Raises UserError for a resize that
        the precision forbids."""
        resize = self.options.policy.resize
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
        return {"budget": budget, "resize": self.options.policy.resize, "cells": self.cells}


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

    options: Config
    precision: Precision
    budgets: BudgetOptions
    eviction: str
    """The name of what decides eviction."""
    policies: tuple[Policy, ...]
    """All of them: eviction's, prefetch's, those given, precision's and those that move slots."""
    ops: Mapping[str, str]
    trace_arrays: frozenset[str]
    """What the trace has beside the rest."""
    tiers: Driver | None = None
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


def settings_of(options: Config) -> Settings:
    """Raises UserError for unknown names, for what does not go together, and for a trace that could
    not be written."""
    budgets = parse_budget_options(options)
    precision = parse_precision(options)
    others = budgets.policies(precision)
    with user_errors():
        given = with_prefetch(options.policy.prefetch, options.policy.policies)
        given = with_placement(placement := placement_of(options), given)
        eviction, policies = with_eviction(options.policy.eviction, given)
        policies = *policies, *others
        check_policies(policies, options.transfer.driver.name)
        check_search(policies, options.transfer.driver.name, len(precision.versions))
    check_places(options, policies, precision)
    check_routing(options, policies)
    with user_errors():
        ops = parse_ops(options.runtime.ops)
    trace = options.runtime.trace
    arrays = frozenset() if trace is None else check_trace(trace.directory, trace.arrays)
    tiers = tiers_of_options(options, precision)
    return Settings(options, precision, budgets, eviction, policies, ops, arrays, tiers, placement)


def parse_budget_options(options: Config) -> BudgetOptions:
    """Raises UserError for unknown names and what does not go together."""
    resize, cells = options.policy.resize, options.policy.cells
    if resize not in RESIZE:
        raise UserError(unknown("resize", resize, RESIZE))
    if not isinstance(cells, str) or cells[:1].isdigit():
        if resize != "none":
            raise UserError(
                "cells in numbers stay as they are; leave out resize, or give cells (those in a "
                "file of options too) a name: cells=uniform"
            )
        return BudgetOptions(options, given_cells=_numbers(cells))
    with user_errors():
        rule, trace, found = parse_option(
            "cells", cells, {key: {"split": str} for key in ALLOCATIONS}, paths=ALLOCATIONS
        )
    fixed = [n for n in ("expert_budget", "kv_budget") if getattr(options.memory, n) is not None]
    if found and fixed:
        raise UserError(f"split of cells decides the split; leave out {' and '.join(fixed)}")
    if found and trace:
        raise UserError(f"split shares its cells by its own trace; leave out ={trace} of cells")
    if rule == "uniform" and trace:
        raise UserError("cells uniform needs no trace; leave it out")
    if resize in ("peak_headroom", "joint") and rule != "uniform":
        raise UserError(
            f"resize {resize} gives every layer as many cells; leave out cells {rule} or take "
            f"resize=mv_wsa"
        )
    return BudgetOptions(options, rule, found.get("split"), trace)


def _numbers(cells: str | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in (cells.split(",") if isinstance(cells, str) else cells))
    except (TypeError, ValueError) as error:
        raise UserError(f"cells are a name or a whole number a layer, not {cells!r}") from error


def parse_precision(options: Config) -> Precision:
    """precision_of, for users: raises UserError, also for a quantizer that does not exist. A
    Precision is taken as it is. With two versions layers have no cells of their own that `cells`
    could move."""
    found = options.policy.precision
    if not isinstance(found, Precision):
        with user_errors():
            found = precision_of(found, seed=options.runtime.seed)
    check_quantizer(found.quantizer)
    if found.mixed and options.policy.cells != "uniform":
        where = (
            "cuts each layer's cells of both versions once, at the start"
            if found.paged
            else "keeps every expert resident in cells that layers share"
        )
        raise UserError(f"precision {found.name} {where}, so cells say nothing; leave them out")
    return found
