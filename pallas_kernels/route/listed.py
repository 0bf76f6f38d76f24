"""route as one Triton-lowered kernel that also keeps the routing in the layer's record and, of few
rows in one program, lists the active experts: for steps that need no plan."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.plan.listing import count, places
from pallas_kernels.route.pallas_triton import Chosen, chosen, configuration, why_not_pallas
from pallas_kernels.route.planned import MOST_SCORES
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import scalar, triton_call

MOST_WARPS = 8
MOST_ROWS = 16


def tile_of(tokens: int, experts: int, rule: RouteRule) -> tuple[int, int] | None:
    """(rows, warps) of the one program's tile, a warp a row up to MOST_WARPS; None where the rows
    or their scores are too many for one program."""
    rows = pl.next_power_of_2(tokens)
    warps = min(rows, MOST_WARPS)
    fits = rows * pl.next_power_of_2(experts) <= MOST_SCORES * 32 * warps
    return (rows, warps) if tokens <= MOST_ROWS and fits and rule.groups == 1 else None


def route_listed(logits, valid, correction, i, records, layer, *, rule):
    """As route_and_list of the api."""
    if reason := why_not_pallas(rule):
        raise ValueError(f"route 'pallas': {reason}; 'xla' takes it")
    (tokens, experts), top_k = logits.shape[-2:], rule.top_k
    tile, many = tile_of(tokens, experts, rule), configuration()
    rows, warps = (many.rows, many.num_warps) if tile is None else tile
    operands = [scalar(layer), logits.astype(jnp.float32), valid]
    operands += [] if correction is None else [scalar(i), correction]
    operands.append(records)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    ids, weights, records, active, *found = triton_call(
        functools.partial(_kernel, rows=rows, rule=rule, lists=tile is not None),
        name="route_list" if tile is not None else "route_record",
        grid=(pl.cdiv(tokens, rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
            jax.ShapeDtypeStruct(records.shape, records.dtype),
            jax.ShapeDtypeStruct((experts,), jnp.int32),
            *((one,) if tile is not None else ()),
        ),
        num_warps=warps,
        num_stages=many.num_stages,
        aliases={len(operands) - 1: 2},
    )(*operands)
    return ids, weights, records, active, found[0][0] if found else jnp.int32(experts)


def _kernel(layer, logits, valid, *refs, rows, rule, lists):
    """Program i: tokens [i · rows, (i + 1) · rows); where it lists, there is one.

    Writes: program i writes the rows of its own tokens in `ids`, `weights` and the layer's record,
    and nobody else's; within a row each chosen expert writes the element of its rank. The first
    program alone writes `active`, in which each expert has an element of its own.
    """
    given = len(refs) - (6 if lists else 5)
    correction, (_, ids, weights, records, active, *active_count) = refs[:given], refs[given:]
    (tokens, experts), top_k = logits.shape[-2:], rule.top_k
    row = pl.program_id(0) * rows + jnp.arange(rows)
    found: Chosen = chosen(logits, valid, correction, row, rule)
    place = row[:, None], found.rank
    plgpu.store(ids.at[place], found.ids, mask=found.listed)
    plgpu.store(weights.at[place], found.weights, mask=found.listed)
    pair, pairs = row[:, None] * top_k + found.rank, tokens * top_k
    bits = lax.bitcast_convert_type(found.weights, jnp.int32)
    for first, value in ((0, found.ids), (pairs, bits)):
        plgpu.store(records.at[layer[0], first + pair], value, mask=found.listed)
    expert = jnp.arange(pl.next_power_of_2(experts))
    if lists:
        used = jnp.max((found.listed & found.real).astype(jnp.int32), axis=0) > 0
        value = jnp.where(used, expert, -1)
        plgpu.store(active.at[places(used)], value, mask=expert < experts)
        active_count[0][0] = count(used)
    else:  # all of them: as a constant XLA would launch a kernel for it in every layer

        @pl.when(pl.program_id(0) == 0)
        def _():
            plgpu.store(active.at[expert], expert, mask=expert < experts)
