"""Decode's kv_write within its attention.

The programs that read a head's keys rotate the queries. The program whose split holds the row's new
token writes the token's key and value. If a row has few splits, the last program of a row and KV
head merges them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.kv_write.pallas_triton import cosine_and_sine, head_scale, normed, turned
from pallas_kernels.paged_attention import kernels
from pallas_kernels.paged_attention.pallas_triton import (
    decode_configuration,
    merge_splits,
    shapes_of_sums,
)
from pallas_kernels.paged_attention.span import SPAN
from pallas_kernels.triton import is_last, scalar, triton_call

MOST_MERGED = 8
"""Most splits that the last program merges, one after the other for all queries of its head. For
more splits decode_attention_merge has a program for each query."""

MERGED = 4
"""Splits that the last program loads at once."""


def write_and_attend(
    projected, arena, places, block_table, lengths, counters, per_layer, *, write, read
):
    qkv, q_norm, k_norm, stack_layer, inverse_frequencies = projected
    page = read.page
    by_head = qkv.reshape(qkv.shape[0], -1, page.head_dim)
    tokens, all_heads, head_dim = by_head.shape
    heads = all_heads - 2 * page.kv_heads
    groups = heads // page.kv_heads
    config = decode_configuration(groups, head_dim, qkv.dtype, read.shared_kib)
    splits = pl.cdiv(block_table.shape[1] * page.block_size, config.split)
    norms = () if q_norm is None else (q_norm, k_norm, scalar(stack_layer))
    # As bits: other parts of the arena are no numbers, and Pallas's interpreter would change NaNs.
    view = arena.reshape(-1, head_dim)
    merging = ()
    if counters is not None and splits <= MOST_MERGED:
        attended = jax.ShapeDtypeStruct((tokens, heads, head_dim), qkv.dtype)
        merging = ((attended, jax.ShapeDtypeStruct(counters.shape, counters.dtype)),)
    merges, place = bool(merging), 6 + len(norms)
    sums, view, merged_within = triton_call(
        functools.partial(_kernel, write=write, read=read, config=config),
        name="decode_attention_write_merge" if merges else "decode_attention_write",
        grid=(tokens, page.kv_heads, splits),
        out_shape=(
            shapes_of_sums(tokens, heads, splits, head_dim),
            jax.ShapeDtypeStruct(view.shape, view.dtype),
            merging,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={place: 3} | ({place + 1: 5} if merges else {}),
    )(
        Inputs(
            *(by_head, norms, places.positions, inverse_frequencies, places.pages),
            *(scalar(places.layer), block_table, view),
        ),
        (counters,) if merges else (),
        per_layer.operand(),
    )
    if merges:
        ((attended, counters),) = merged_within
        attended = attended.reshape(tokens, heads * head_dim)
    else:
        attended = merge_splits(lengths, sums, qkv.dtype, per_layer, split=config.split)
    return attended, view.reshape(arena.shape), counters


class Inputs(NamedTuple):
    """Operands, or a kernel's refs to them."""

    qkv: Any
    norms: tuple
    """Stacked norm weights of queries and of keys, and the layer's index; or empty."""
    positions: Any
    frequencies: Any
    pages: Any
    layer: Any
    block_table: Any
    arena: Any


def _kernel(inputs, _, per_layer, sums, kv, merging, *, write, read, config):
    """kernels.split on queries that it rotates itself, with the new token's key and value.

    - `merging`: one pair of attended queries and counters, or empty.

    Writes: program (t, head, split) writes [t, the head's queries, split] of totals, tops and
    masses, if a query sees the split. If the split holds positions[t], the program also writes the
    two KV rows of that token and head. No program of the launch reads them: this one has them in
    registers, and others see earlier tokens or other rows' pages. A row at position −1, or with
    page −1, writes no KV. The program that comes last by counters[t, head] merges the sums in
    ascending order, so the result does not depend on which one it is, and writes attended[t, the
    head's queries]. For a row at position −1 the first program writes zeros.
    """
    qkv, norms, positions, _, pages, layer, block_table, _ = inputs
    page = read.page
    groups = qkv.shape[1] // page.kv_heads - 2
    t, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    last, begin = positions[t], split * config.split
    low = kernels.first_seen(last, kernels.window_of(per_layer))
    end = begin + config.split

    def merge(out, first, stop):
        query = jnp.arange(pl.next_power_of_2(groups))
        heads = kv_head * groups + query, query < groups
        kernels.merge_heads(t, *heads, sums, per_layer, out, first, stop, MERGED)

    for out, _ in merging:
        pl.when((last < 0) & (split == 0))(functools.partial(merge, out, 0, 0))

    @pl.when((begin <= last) & (end > low))
    def _():
        row = jnp.arange(config.rows)
        column = jnp.arange(kernels.width(page.head_dim))
        real = (row < groups)[:, None] & (column < page.head_dim)[None]
        head = kv_head * groups + row
        heads = page.kv_heads * groups
        turn = functools.partial(_turn, inputs, t, write)
        q_norm, k_norm = ((norms[i], norms[2]) if norms else None for i in (0, 1))
        q = turn(head, row < groups, q_norm)

        owns = last < end
        one = jnp.arange(1)
        key = turn(heads + kv_head + one, one < 1, k_norm)
        new = (one < 1)[:, None] & (column < page.head_dim)[None] & (owns & (pages[t] >= 0))
        at = (heads + page.kv_heads + kv_head + one)[:, None], column[None]
        value = plgpu.load(qkv.at[t, *at], mask=new, other=0)
        place = pages[t] + layer[0] * page.rows_per_layer
        place = (place + (kv_head * page.block_size + last % page.block_size) + one)[:, None]
        plgpu.store(kv.at[place, column[None]], _as_uint16(key), mask=new)
        plgpu.store(kv.at[place + page.rows_to_value, column[None]], _as_uint16(value), mask=new)

        def span(s, found, newest=None):
            position, held = kernels.span_of(s, low, last)
            there = held if newest is None else held & (position < last)
            keys, values = kernels.load(
                kv, block_table, t, position, there, layer[0], kv_head, page
            )
            keys, values = (lax.bitcast_convert_type(x, qkv.dtype) for x in (keys, values))
            if newest is not None:
                keys, values = (
                    jnp.where((position == last)[:, None], latest, stored)
                    for latest, stored in zip(newest, (keys, values), strict=True)
                )
            return kernels.attend(q, keys, values, held[None], found, read.scale)

        # Only the last span selects: loads of the other spans bypass registers.
        spans = jnp.where(owns, last // SPAN, end // SPAN)
        found = lax.fori_loop(jnp.maximum(begin, low) // SPAN, spans, span, kernels.no_sums(q))
        newest = functools.partial(span, last // SPAN, newest=(key, value))
        total, top, mass = lax.cond(owns, newest, lambda found: found, found)
        plgpu.store(sums.totals.at[t, head[:, None], split, column[None]], total, mask=real)
        plgpu.store(sums.tops.at[t, head, split], top, mask=row < groups)
        plgpu.store(sums.masses.at[t, head, split], mass, mask=row < groups)
        first, stop = low // config.split, last // config.split + 1
        for out, counters in merging:
            last_one = is_last(counters, (t * page.kv_heads + kv_head,), stop - first)
            pl.when(last_one)(functools.partial(merge, out, first, stop))


def _turn(inputs, t, write, heads, real, norm):
    """A token's heads [R, width], normalised and rotated as kv_write does; zeros where not real.

    - `norm`: stacked weights and the layer's index; None: no norm.
    """
    qkv, head_dim = inputs.qkv, write.page.head_dim
    half = head_dim // 2
    column = jnp.arange(kernels.width(head_dim))
    first, inside = column < half, column < head_dim
    partner = jnp.where(first, column + half, column - half)

    def load(columns, mask):
        at = qkv.at[t, heads[:, None], columns[None]]
        return plgpu.load(at, mask=real[:, None] & mask[None], other=0).astype(jnp.float32)

    x, other = load(column, inside), load(partner, inside)
    if norm is not None:
        weights, layer = norm
        narrow = jnp.arange(pl.next_power_of_2(half))
        low, high = (load(start + narrow, narrow < half) for start in (0, half))
        scale = head_scale(low, high, head_dim, write.eps)

        def weighted(x, columns):
            weight = plgpu.load(weights.at[layer[0], columns], mask=inside, other=0)
            return normed(x, weight.astype(jnp.float32), scale, qkv.dtype)

        x, other = weighted(x, column), weighted(other, partner)
    angle = jnp.where(first, column, column - half)
    frequency = plgpu.load(inputs.frequencies.at[angle], mask=inside, other=0)
    angles = cosine_and_sine(inputs.positions[t], frequency, write.attention_factor, qkv.dtype)
    return turned(x, other, jnp.where(first, -1.0, 1.0), angles, qkv.dtype)


def _as_uint16(x):
    return lax.bitcast_convert_type(x, jnp.uint16)
