"""route_and_list within the router's product, for few rows: the product's last program routes and
lists, which saves a launch in each layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.linear.pallas_triton import Last, Norm, norm_linear_parts_then, parts_of
from pallas_kernels.route.listed import MOST_ROWS, Routed, keep, list_active, shapes_routed
from pallas_kernels.route.pallas_triton import why_not_pallas
from pallas_kernels.route.planned import MOST_SCORES
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import scalar


def warps_of(tokens: int) -> int:
    """Enough warps to hold a program's rows without spilling registers. More warps would not share
    work: each program normalises its whole tile, and a warp routes one row at a time."""
    return 4 if tokens <= 8 else 8


def routes_last(
    tokens: int, experts: int, hidden: int, dtype: jax.typing.DTypeLike, rule: RouteRule
) -> bool:
    """Whether the last program of a product with weights [E, D] routes the tokens: not if there are
    too many tokens or scores for one program, nor if the product has no parts."""
    scores = pl.next_power_of_2(tokens) * pl.next_power_of_2(experts)
    fits = tokens <= MOST_ROWS and scores <= MOST_SCORES * 32 * warps_of(tokens)
    several = parts_of(experts, hidden, dtype).count > 1
    return fits and several and rule.groups == 1 and why_not_pallas(rule) is None


def norm_route_listed(x, norm: Norm, weights, operands, records, layer, counters, *, rule, tiling):
    """norm_route_and_list of the api, if routes_last says so."""
    tokens, (valid, correction, i) = x.shape[0], operands
    shapes = shapes_routed(tokens, weights.shape[1], rule.top_k, records)
    corrections = () if correction is None else (scalar(i), correction)
    last = Last(
        name="norm_route_list",
        run=functools.partial(_route, rule=rule),
        counters=counters,
        operands=(records, scalar(layer), valid, corrections),
        out_shape=(*shapes, jax.ShapeDtypeStruct((1,), jnp.int32)),
        aliases={0: 2},
        num_warps=warps_of(tokens),
    )
    normed, _, counters, ids, weights, records, active, count = norm_linear_parts_then(
        x, norm, weights, i, last, tiling
    )
    return normed, ids, weights, records, active, count[0], counters


def _route(logits, operands, results, *, rule):
    """The work of the last program, for all tokens.

    Writes: it alone writes the results beside the product, each element once, as listed._kernel
    does.
    """
    _records, layer, valid, correction = operands
    *routed, number = results
    routed = Routed(*routed)
    row = jnp.arange(pl.next_power_of_2(routed.ids.shape[0]))
    used = keep((logits, valid, correction), layer, routed, row, rule)
    list_active(used, routed.active, number)
