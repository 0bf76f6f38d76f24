"""Options whose names have become what they stand for: policies, precision, ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from host_offload.control.interface import Policy
from host_offload.control.rules import check_policies
from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.precision.names import Precision
from host_offload.policies.prefetch.names import with_prefetch
from moejax.errors import user_errors
from moejax.start.budget_options import BudgetOptions, parse_budget_options
from moejax.start.options import Options
from moejax.start.precision import parse_precision
from moejax.traces.tracer import check_trace
from pallas_kernels import parse_ops


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
        eviction, policies = with_eviction(options.eviction, given)
        policies = *policies, *others
        check_policies(policies, options.driver)
        ops = parse_ops(options.ops)
    arrays = check_trace(options.trace, options.trace_arrays)
    return Settings(options, precision, budgets, eviction, policies, ops, arrays)
