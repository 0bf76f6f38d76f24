"""route as one Triton-lowered kernel for steps without a plan.

It also writes the routing into the layer's record and lists the active experts: in its one program
for few rows, in the last of several programs for more rows. For very many rows it lists all
experts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.plan.listing import count, places
from pallas_kernels.route.pallas_triton import Chosen, chosen, configuration, why_not_pallas
from pallas_kernels.route.planned import MOST_SCORES
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import is_last, scalar, triton_call

MOST_WARPS = 8
MOST_ROWS = 16

MOST_FLAGS = 8192
"""Most flags, one for each program and expert, that the last program reads. With more, all experts
are listed, unless there are more experts than pairs: expert_ffn has at most a program for each
pair."""


def tile_of(tokens: int, experts: int, rule: RouteRule) -> tuple[int, int] | None:
    """(rows, warps) of the tile of one program, a warp for each row up to MOST_WARPS; None: there
    are too many rows or scores for one program."""
    rows = pl.next_power_of_2(tokens)
    warps = min(rows, MOST_WARPS)
    fits = rows * pl.next_power_of_2(experts) <= MOST_SCORES * 32 * warps
    return (rows, warps) if tokens <= MOST_ROWS and fits and rule.groups == 1 else None


class Routed(NamedTuple):
    """Refs to the results of a kernel that lists experts; see route_and_list."""

    ids: Any
    weights: Any
    records: Any
    active: Any


def route_listed(logits, operands, records, layer, counters=None, *, rule):
    """route_and_list of the api."""
    if reason := why_not_pallas(rule):
        raise ValueError(f"route 'pallas': {reason}; 'xla' takes it")
    (tokens, experts), top_k = logits.shape[-2:], rule.top_k
    tile, many = tile_of(tokens, experts, rule), configuration()
    rows, warps = (many.rows, many.num_warps) if tile is None else tile
    valid, correction, i = operands
    corrections = () if correction is None else (scalar(i), correction)
    programs, place = pl.cdiv(tokens, rows), 3 + len(corrections)
    flags = pl.next_power_of_2(programs), pl.next_power_of_2(experts)
    few = flags[0] * flags[1] <= MOST_FLAGS or tokens * top_k < experts
    by_last = programs > 1 and few
    lists = programs == 1 or by_last
    own = jnp.zeros(1, jnp.int32) if counters is None else counters
    outs = [((1,), jnp.int32)] * lists
    outs += [(own.shape, jnp.int32), (flags, jnp.int32)] * by_last
    (ids, weights, records, active), *found = triton_call(
        functools.partial(_kernel, rows=rows, rule=rule, lists=lists, by_last=by_last),
        name="route_list_last" if by_last else "route_list" if lists else "route_record",
        grid=(programs,),
        out_shape=(
            shapes_routed(tokens, experts, top_k, records),
            *(jax.ShapeDtypeStruct(*out) for out in outs),
        ),
        num_warps=warps,
        num_stages=many.num_stages,
        aliases={place: 2} | ({place + 1: 5} if by_last else {}),
    )(
        scalar(layer),
        (logits.astype(jnp.float32), valid, corrections),
        (records, *((own,) if by_last else ())),
    )
    count = found[0][0] if lists else jnp.int32(experts)
    after = found[1] if by_last and counters is not None else counters
    return ids, weights, records, active, count, after


def shapes_routed(tokens: int, experts: int, top_k: int, records: jax.Array) -> Routed:
    pairs = tokens, top_k
    shapes = pairs, pairs, records.shape, (experts,)
    dtypes = jnp.int32, jnp.float32, records.dtype, jnp.int32
    return Routed(*map(jax.ShapeDtypeStruct, shapes, dtypes))


def _kernel(layer, given, _, routed, *more, rows, rule, lists, by_last):
    """Program i routes tokens [i · rows, (i + 1) · rows). A single program lists the active
    experts; of several programs with flags, the last one lists them by the flags of all.

    - `more`: the count if the kernel lists, then counters and flags.

    Writes: program i alone writes the rows of its tokens in `ids`, `weights` and the layer's
    record, and its row of `flags`; within a row each chosen expert writes the element of its rank.
    One program, the first or with flags the last, writes `active`, in which each expert has its own
    element, and the count.
    """
    (tokens, experts), active = given[0].shape[-2:], routed.active
    row = pl.program_id(0) * rows + jnp.arange(rows)
    used = keep(given, layer, routed, row, rule)
    expert = jnp.arange(pl.next_power_of_2(experts))
    if by_last:
        counters, flags = more[1:]
        program, programs = pl.program_id(0), pl.cdiv(tokens, rows)
        plgpu.store(flags.at[program, expert], used)

        @pl.when(is_last(counters, (program * 0,), programs))
        def _():
            of = jnp.arange(flags.shape[0])
            mask = jnp.broadcast_to((of < programs)[:, None], flags.shape)
            noted = plgpu.load(flags.at[of[:, None], expert[None, :]], mask=mask, other=0)
            list_active(jnp.max(noted, axis=0), active, more[0])

    elif lists:
        list_active(used, active, more[0])
    else:  # all experts are listed; for a constant XLA would launch a kernel in every layer

        @pl.when(pl.program_id(0) == 0)
        def _():
            plgpu.store(active.at[expert], expert, mask=expert < experts)


def keep(given, layer, routed, row, rule):
    """Routes the tokens `row`, int32[rows], and writes their rows of ids, weights and the layer's
    record.

    - `given`: logits, valid and correction; see chosen.

    Returns int32[E], E rounded up to a power of two: 1 for experts that a token chose.
    """
    (logits, valid, correction), (ids, weights, records, _) = given, routed
    tokens, top_k = logits.shape[-2], rule.top_k
    found: Chosen = chosen(logits, valid, correction, row, rule)
    place = row[:, None], found.rank
    plgpu.store(ids.at[place], found.ids, mask=found.listed)
    plgpu.store(weights.at[place], found.weights, mask=found.listed)
    pair, pairs = row[:, None] * top_k + found.rank, tokens * top_k
    bits = lax.bitcast_convert_type(found.weights, jnp.int32)
    for first, value in ((0, found.ids), (pairs, bits)):
        plgpu.store(records.at[layer[0], first + pair], value, mask=found.listed)
    return jnp.max((found.listed & found.real).astype(jnp.int32), axis=0)


def list_active(used, active, number):
    """Writes the used experts, ascending, to the front of active [E], and their number to number
    [1].

    - `used`: the result of keep, or of several programs together.
    """
    (experts,), used = active.shape, used > 0
    expert = jnp.arange(len(used))
    value = jnp.where(used, expert, -1)
    plgpu.store(active.at[places(used)], value, mask=expert < experts)
    number[0] = count(used)
