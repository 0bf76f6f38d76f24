from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.linear import LinearOptions, Norm, check_normed, norm_linear_parts, sum_of_parts
from pallas_kernels.plan import Plan, Tables, plan_routed
from pallas_kernels.plan.api import check_records
from pallas_kernels.plan.record import active_experts, record
from pallas_kernels.route.listed import route_listed
from pallas_kernels.route.normed import norm_route_listed, routes_last
from pallas_kernels.route.pallas_triton import why_not_pallas
from pallas_kernels.route.planned import route_planned, rows_of
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import check_counters

__all__ = [
    "IMPLEMENTATIONS",
    "NormRouteOptions",
    "RouteOperands",
    "RouteRule",
    "norm_route_and_list",
    "route",
    "route_and_list",
    "route_and_plan",
    "why_not_pallas",
]

IMPLEMENTATIONS = implementations("route", ("xla", "pallas", "cpu"))

AS_ONE = {"pallas": route_planned}
"""Implementations that do all of route_and_plan at once; of others it is the two, one by one."""

LISTED = {"pallas": route_listed}
"""Implementations that do all of route_and_list at once."""

NORMED = {"pallas": norm_route_listed}
"""Implementations, of all three of its ops, that do all of norm_route_and_list at once."""

IN_PARTS = {"pallas"}
"""Implementations that add up the parts of logits themselves."""


def route(
    logits: Float[Array, "*S T E"],
    valid: Bool[Array, " T"],
    correction: Float[Array, "L E"] | None = None,
    layer: Int[Array, ""] | int = 0,
    *,
    rule: RouteRule,
    implementation: str = "xla",
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Chooses each token's experts.

    logits: float32 router logits, or the parts [S, T, E] of linear_parts that add up to them.
    valid: rows that hold a token; the others get ids E and weights 0. correction: stacked over
    layers, float32; correction[layer] is added to the scores for the choice of groups and experts,
    not for the weights (`e_score_correction_bias`).

    Returns (ids, weights), each [T, K], a token's ids **ascending**: slot k of every later array
    is the rank of the expert id within the token, which fixes the order of the final sum whatever
    computed the parts. Ties go to the lower id, of experts and of groups. Weights are float32. A
    token whose logits have a NaN gets ids that exist and weights that are NaN.

    Raises ValueError for a rule that the number of experts does not allow, a correction that does
    not fit, an unknown implementation, or a rule that the implementation cannot follow.
    """
    _check(logits, correction, rule)
    fn = pick("route", IMPLEMENTATIONS, implementation)
    if implementation not in IN_PARTS:
        logits = summed(logits)
    return fn(logits, valid, correction, layer, rule=rule)


class RouteOperands(NamedTuple):
    """What decides where tokens go beside their logits; as of route."""

    valid: Bool[Array, " T"]
    correction: Float[Array, "L E"] | None
    stack_layer: Int[Array, ""] | int
    """The layer of `correction`, and of the norm and the router that norm_route_and_list has."""


def route_and_plan(
    logits: Float[Array, "*S T E"],
    operands: RouteOperands,
    tables: Tables,
    layer: Int[Array, ""] | int,
    records: Int[Array, "M W"],
    *,
    rule: RouteRule,
    versions: int = 1,
    implementation: str = "xla",
) -> tuple[Int[Array, "T K"], Float[Array, "T K"], Tables, Int[Array, "M W"], Plan]:
    """route, then plan_routed of what it chose: (ids, weights, tables, records, plan).

    layer: the one of tables and records. implementation: of both ops. One kernel does both where
    the rows are few (`planned.rows_of`), with the same bits.

    Raises as the two do.
    """
    few = rows_of(logits.shape[-2], tables.owner.shape[1], logits.shape[-1], rule) is not None
    if few and implementation in AS_ONE:
        _check(logits, operands.correction, rule)
        check_records(tables, logits.shape[-2] * rule.top_k, records, versions)
        given = logits, operands, tables, layer, records
        *routed, parts = AS_ONE[implementation](*given, rule=rule, versions=versions)
        return (*routed, Plan(*parts))
    ids, weights = route(logits, *operands, rule=rule, implementation=implementation)
    given = tables, layer, ids, weights, records
    options = {"versions": versions, "implementation": implementation}
    return (ids, weights, *plan_routed(*given, **options))


def route_and_list(
    logits: Float[Array, "*S T E"],
    operands: RouteOperands,
    records: Int[Array, "M W"],
    layer: Int[Array, ""] | int,
    counters: Int[Array, " C"] | None = None,
    *,
    rule: RouteRule,
    implementation: str = "xla",
) -> tuple[
    Int[Array, "T K"],
    Float[Array, "T K"],
    Int[Array, "M W"],
    Int[Array, " E"],
    Int[Array, ""],
    Int[Array, " C"] | None,
]:
    """route, and what a layer needs of it where every expert is resident, so that nothing is to be
    planned: (ids, weights, records, active, count, counters).

    records: a layer's row has the ids and then the bits of the weights, W = 2·T·K; written in place
    when donated. layer: the one of records. active: the first `count` are different experts,
    ascending, all that some row chose among them. Those of a kernel may be all E, where there are
    as many pairs. counters: zeros, given back as
    zeros, in which a kernel's programs find out which is the last; None: it makes its own.

    Raises as route, and ValueError for records of another width and for other counters.
    """
    pairs = logits.shape[-2] * rule.top_k
    _check_kept(records, counters, pairs)
    if implementation in LISTED:
        _check(logits, operands.correction, rule)
        return LISTED[implementation](logits, operands, records, layer, counters, rule=rule)
    ids, weights = route(logits, *operands, rule=rule, implementation=implementation)
    row = record(ids, weights, jnp.zeros(0, jnp.int32))
    records = lax.dynamic_update_index_in_dim(records, row, layer, 0)
    active = active_experts(ids, jnp.ones(logits.shape[-1], bool))
    first = jnp.argsort(~active, stable=True).astype(jnp.int32)
    return ids, weights, records, first, jnp.sum(active, dtype=jnp.int32), counters


@dataclasses.dataclass(frozen=True)
class NormRouteOptions:
    """What decides the program of norm_route_and_list, besides shapes."""

    rule: RouteRule
    linear: LinearOptions
    """Of the norm and the router's product."""
    implementation: str = "xla"

    @property
    def implementations(self) -> set[str]:
        return {
            self.implementation,
            self.linear.implementation,
            self.linear.norm_implementation,
        }


def norm_route_and_list(
    x: Float[Array, "T D"],
    norm: Norm,
    weights: Float[Array, "L E D"],
    operands: RouteOperands,
    records: Int[Array, "M W"],
    layer: Int[Array, ""] | int,
    counters: Int[Array, " C"] | None = None,
    *,
    options: NormRouteOptions,
) -> tuple[
    Float[Array, "T D"],
    Int[Array, "T K"],
    Float[Array, "T K"],
    Int[Array, "M W"],
    Int[Array, " E"],
    Int[Array, ""],
    Int[Array, " C"] | None,
]:
    """norm_linear_parts of the router, then route_and_list of its logits: (normed, ids, weights,
    records, active, count, counters), in their bits.

    Where all three are kernels, there are counters and the rows are few (`normed.routes_last`) it
    is one launch, the last program of which routes. Raises ValueError as both.
    """
    rule, name = options.rule, options.implementation
    _, experts, hidden = weights.shape
    if (
        options.implementations == {name}
        and name in NORMED
        and counters is not None
        and routes_last(x.shape[0], experts, hidden, weights.dtype, rule)
    ):
        logits = jax.ShapeDtypeStruct((x.shape[0], experts), x.dtype)
        _check(logits, operands.correction, rule)
        _check_kept(records, counters, x.shape[0] * rule.top_k)
        tiling = check_normed(x, norm, weights, options.linear)
        given = x, norm, weights, operands, records, layer, counters
        return NORMED[name](*given, rule=rule, tiling=tiling)
    normed, logits = norm_linear_parts(x, norm, weights, operands.stack_layer, options.linear)
    normed, logits = lax.optimization_barrier((normed, logits))
    given = logits, operands, records, layer, counters
    return normed, *route_and_list(*given, rule=rule, implementation=name)


def _check_kept(records, counters, pairs):
    if counters is not None:
        check_counters(counters, 1, "a step")
    if records.ndim != 2 or records.shape[1] != 2 * pairs:
        raise ValueError(
            f"records are {records.shape}, those of {pairs} pairs are [M, {2 * pairs}]"
        )


def _check(logits, correction, rule):
    experts = logits.shape[-1]
    rule.check(experts, correction=correction is not None)
    if correction is not None and (correction.ndim != 2 or correction.shape[1] != experts):
        raise ValueError(f"correction is {correction.shape}, it must be [layers, {experts}]")


def summed(logits: Float[Array, "*S T E"]) -> Float[Array, "T E"]:
    """The logits themselves, where they come in parts."""
    return logits if logits.ndim == 2 else sum_of_parts(logits)
