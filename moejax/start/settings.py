"""Options as objects: policies, precision, ops."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Policy
from host_offload.control.rules import check_form, check_policies, check_search
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom, ResidentHeadroom
from host_offload.policies.budget.user_caps import UserCaps
from host_offload.policies.eviction.eviction_names import with_eviction
from host_offload.policies.placement.placement_names import PREFIX, placement_policy, with_placement
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.policies.prefetch.prefetch_names import with_prefetch
from moejax.checkpoints.versions import check_quantizer
from moejax.errors import user_errors
from moejax.start.choices import Settings
from moejax.start.conflicts import Situation, refuse_conflicts
from moejax.start.options import Config
from moejax.traces.tracer import check_trace
from pallas_kernels import parse_ops


def settings_of(options: Config) -> Settings:
    """Returns the settings that options name. Raises UserError for unknown names, for options that
    exclude each other, and for a trace that could not be written."""
    policy, trace = options.policy, options.runtime.trace
    precision = parse_precision(options)
    with user_errors():
        given = with_prefetch(policy.prefetch, policy.policies)
        given = with_placement(placement := placement_with_costs(options), given)
        eviction, policies = with_eviction(policy.eviction, given)
        for one in policies:
            check_form(one)
        ops = parse_ops(options.runtime.ops)
    policies = *policies, *budget_policies(options, precision)
    found = Settings(options, precision, eviction, policies, ops, frozenset(), placement)
    refuse_conflicts(Situation(found))
    with user_errors():
        check_policies(policies, options.transfer.driver.name)
        check_search(policies, options.transfer.driver.name, len(precision.versions))
    if trace is None:
        return found
    return dataclasses.replace(found, trace_arrays=check_trace(trace.directory, trace.arrays))


def parse_precision(options: Config) -> Precision:
    """Returns the precision that options name; a Precision passes unchanged. Raises UserError for
    an unknown name or quantizer."""
    found = options.policy.precision
    if not isinstance(found, Precision):
        with user_errors():
            found = precision_of(found, seed=options.runtime.seed)
    check_quantizer(found.quantizer)
    return found


def budget_policies(options: Config, precision: Precision) -> tuple[Policy, ...]:
    """Returns the policies of the precision and the policies that move slots while requests run."""
    cells, resize = options.policy.cells, options.policy.resize
    if isinstance(precision.policy, DynaExq) and resize == "peak_headroom":
        return dataclasses.replace(precision.policy, resized=True), ResidentHeadroom()
    moving: tuple[Policy, ...] = ()
    if resize == "mv_wsa":
        kv_miss = options.memory.kv_overflow
        moving = (MvWsa(allocation=cells.rule, kv_miss=kv_miss, trace=cells.split),)
    elif resize != "none":
        evenly = {"peak_headroom": PeakHeadroom, "right_size": UserCaps, "joint": JointBudget}
        moving = (evenly[resize](),)
    elif cells.rule != "uniform" and cells.trace is None and cells.split is None:
        moving = (LayerCells(allocation=cells.rule),)  # by live curves
    return *precision.policies, *moving


def placement_with_costs(options: Config) -> str | None:
    """Returns the placement. If it says nothing about loads, they take the time of the stated link,
    if one is stated. Raises ValueError for an unknown name."""
    placement = options.policy.placement
    if placement is None or placement.startswith(PREFIX):
        return placement
    policy = placement_policy(placement)
    of_link = options.transfer.transfers.rate and not policy.load_of_link
    return f"{placement},load=link" if of_link and "load" not in dict(policy.stated) else placement
