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
"""Implementation → its route_and_plan in one launch; others run route, then plan."""

LISTED = {"pallas": route_listed}
"""Implementation → its route_and_list in one launch."""

NORMED = {"pallas": norm_route_listed}
"""Implementation of all three ops → its norm_route_and_list in one launch."""

IN_PARTS = {"pallas"}
"""Implementations that take logits in parts."""


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

    Ties go to the lower id, of experts and of groups. A token with a NaN in its logits gets valid
    ids and NaN weights.

    - `logits`: float32 router logits, or parts [S, T, E] of linear_parts that add up to them.
    - `valid`: rows that hold a token. Other rows get ids E and weights 0.
    - `correction`: float32, stacked over layers. correction[layer] is added to the scores for the
      choice of groups and experts, not for the weights (`e_score_correction_bias`).

    Returns (ids, weights), each [T, K], weights in float32. A token's ids are **ascending**: slot k
    of every later array is the rank of the expert id within the token, which fixes the order of the
    final sum.

    Raises ValueError for a rule that the number of experts does not allow, a correction that does
    not fit, an unknown implementation, or a rule that the implementation cannot follow.
    """
    _check(logits, correction, rule)
    fn = pick("route", IMPLEMENTATIONS, implementation)
    if implementation not in IN_PARTS:
        logits = summed(logits)
    return fn(logits, valid, correction, layer, rule=rule)


class RouteOperands(NamedTuple):
    """Operands of routing beside logits; see route."""

    valid: Bool[Array, " T"]
    correction: Float[Array, "L E"] | None
    stack_layer: Int[Array, ""] | int
    """The layer's index in `correction`, and in norm and router of norm_route_and_list."""


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
    """route, then plan_routed of the chosen experts. One kernel does both if the rows are few
    (`planned.rows_of`), with the same bits.

    - `layer`: of tables and records.
    - `implementation`: of both ops.

    Returns (ids, weights, tables, records, plan). Raises as both ops do.
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
    """route, and the list of active experts: all that a layer needs if every expert is resident.

    - `records`: a layer's row gets the ids, then the bits of the weights, W = 2·T·K; updated in
      place when donated.
    - `layer`: of records.
    - `counters`: zeros before and after, by which the last program of a kernel finds out that it is
      the last; None: the op makes its own.

    Returns (ids, weights, records, active, count, counters). The first `count` entries of `active`
    are different experts, ascending, with all chosen ones among them; a kernel may list all E if
    there are at least as many pairs. Raises as route, and ValueError for records of another width
    and for counters of another size.
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
    """What decides the program of norm_route_and_list, beside shapes."""

    rule: RouteRule
    linear: LinearOptions
    """Options of the norm and the router's product."""
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
    """norm_linear_parts of the router, then route_and_list of its logits, with the bits of both.

    If all three ops are kernels, counters are given and the rows are few (`normed.routes_last`), it
    is one launch, whose last program routes.

    Returns (normed, ids, weights, records, active, count, counters). Raises ValueError as both.
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
        raise ValueError(f"records are {records.shape}, {pairs} pairs need [M, {2 * pairs}]")


def _check(logits, correction, rule):
    experts = logits.shape[-1]
    rule.check(experts, correction=correction is not None)
    if correction is not None and (correction.ndim != 2 or correction.shape[1] != experts):
        raise ValueError(f"correction is {correction.shape}, it must be [layers, {experts}]")


def summed(logits: Float[Array, "*S T E"]) -> Float[Array, "T E"]:
    """The logits, added up if they come in parts."""
    return logits if logits.ndim == 2 else sum_of_parts(logits)
