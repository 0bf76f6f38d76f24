"""The bodies of the attention kernels.

Softmax is computed in powers of two: scores are scaled by log2(e) · scale.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.paged_attention.span import SPAN

MERGED = 8
"""Splits that the merge loads at once. It adds them one by one."""


def kv_rows(arena, page, dtype):
    """The arena as rows [.., head_dim], a free view. (Bitcasts of a loaded tile would pass through
    registers on the way to a matrix product.)"""
    return lax.bitcast_convert_type(arena, dtype).reshape(-1, page.head_dim)


def tile_of_prefill(chunk_rows, queries):
    """A program's chunk, and its first query within the chunk. Late chunks of a prompt see the most
    keys, and the longest programs start first."""
    tiles = pl.cdiv(chunk_rows, queries)
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    return tile // tiles, tile % tiles * queries


class Sums(NamedTuple):
    """Sums of softmax over parts of each row's tokens, or a kernel's refs to them; float32."""

    totals: Any
    """[T, H, splits, value_dim]: sums of values, weighted by powers of two below the top."""
    tops: Any
    """[T, H, splits]: the largest scores."""
    masses: Any
    """[T, H, splits]: sums of the weights."""


def split(q_in, kv, block_table, lengths, layer, per_layer, sums, *, options, config):
    """Softmax sums of one sequence's queries of one KV head over one split of its tokens.

    Writes: program (t, head, split) alone writes [t, the head's queries, split] of totals, tops and
    masses. Splits that no query sees are not written.
    """
    t, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, page, groups = lengths[t], options.page, q_in.shape[1] // options.page.kv_heads
    low, begin = first_seen(length - 1, window_of(per_layer)), split * config.split
    end = jnp.minimum(begin + config.split, length)

    @pl.when((begin < length) & (begin + config.split > low))
    def _():
        row = jnp.arange(config.rows)
        column = jnp.arange(width(page.head_dim))
        real = (row < groups)[:, None] & (column < page.head_dim)[None]
        head = (kv_head * groups + row)[:, None]
        q = plgpu.load(q_in.at[t, head, column[None]], mask=real, other=0)

        def span(s, sums):
            position, held = span_of(s, low, length - 1)
            keys, values = load(kv, block_table, t, position, held, layer[0], kv_head, page)
            return attend(q, keys, values, held[None], sums, options.scale)

        first = jnp.maximum(begin, low) // SPAN
        total, top, mass = lax.fori_loop(first, pl.cdiv(end, SPAN), span, no_sums(q))
        plgpu.store(sums.totals.at[t, head, split, column[None]], total, mask=real)
        at = t, kv_head * groups + row, split
        plgpu.store(sums.tops.at[at], top, mask=row < groups)
        plgpu.store(sums.masses.at[at], mass, mask=row < groups)


def merge(lengths, sums, per_layer, out, *, split):
    """One query's softmax over its splits, added in ascending order.

    Writes: program (t, head) writes out[t, head]; zeros for an empty row.
    """
    t, head = pl.program_id(0), pl.program_id(1) + jnp.arange(1)
    length = lengths[t]
    first = first_seen(length - 1, window_of(per_layer)) // split
    stop = pl.cdiv(length, split)
    merge_heads(t, head, head >= 0, sums, per_layer, out, first, stop, MERGED)


def merge_heads(t, head, real, parts, per_layer, out, first, stop, many):
    """Writes the softmax of a row's queries `head`, int32[R], where `real`, over splits `first` to
    `stop`, added in ascending order.

    - `many`: splits that are loaded at once; no bit depends on it.
    """
    head_dim = out.shape[2]
    column = jnp.arange(width(head_dim))
    inside = real[:, None] & (column < head_dim)[None]
    at = head[:, None], column[None]

    def group(g, sums):
        loaded = []
        for i in range(many):  # these loads do not wait for a sum
            s = g * many + i
            written = (first <= s) & (s < stop)
            part = plgpu.load(parts.totals.at[t, at[0], s, at[1]], mask=written & inside, other=0)
            top = plgpu.load(parts.tops.at[t, head, s], mask=written & real, other=-jnp.inf)
            mass = plgpu.load(parts.masses.at[t, head, s], mask=written & real, other=0)
            loaded.append((part, top, mass))
        for part, part_top, part_mass in loaded:
            total, top, mass = sums
            new_top = jnp.maximum(top, part_top)
            shrink, grow = power(top, new_top), power(part_top, new_top)
            total = total * shrink[:, None] + part * grow[:, None]
            sums = total, new_top, mass * shrink + part_mass * grow
        return sums

    empty = jnp.zeros(head.shape, jnp.float32)
    sums = jnp.zeros(inside.shape, jnp.float32), empty - jnp.inf, empty
    total, top, mass = lax.fori_loop(first // many, pl.cdiv(stop, many), group, sums)
    mass = plus_sinks(mass, top, head, real, per_layer)
    attended = (total / jnp.where(mass == 0, 1, mass)[:, None]).astype(out.dtype)
    plgpu.store(out.at[t, *at], attended, mask=inside)


def prefill(q_in, kv, block_table, chunks, layer, per_layer, out, *, options, config):
    """Causal attention of a tile of one chunk's queries, for heads that share a KV head.

    Writes: program (tile, i) alone writes out[the tile's rows, its heads], padding included. Tiles
    without a real row are not written.
    """
    sequence, start, length, count = chunks
    page, groups = options.page, q_in.shape[1] // options.page.kv_heads
    window = window_of(per_layer)
    chunk_rows = q_in.shape[0] // sequence.shape[0]
    chunk, first_query = tile_of_prefill(chunk_rows, config.queries)
    heads_tile = pl.program_id(1)

    @pl.when((chunk < count[0]) & (first_query < length[chunk]))
    def _():
        row = jnp.arange(config.queries * config.heads)
        query = first_query + row // config.heads
        head = heads_tile * config.heads + row % config.heads
        kv_head = heads_tile * config.heads // groups
        column = jnp.arange(width(page.head_dim))
        real = (query < chunk_rows)[:, None] & (column < page.head_dim)[None]
        at = (chunk * chunk_rows + query)[:, None], head[:, None], column[None]
        q = plgpu.load(q_in.at[at], mask=real, other=0)

        # Padding rows repeat the last real position, so they look at no page that is not there.
        row_position = (start[chunk] + jnp.minimum(query, length[chunk] - 1))[:, None]
        low = first_seen(start[chunk] + first_query, window)
        last = start[chunk] + jnp.minimum(first_query + config.queries, length[chunk]) - 1

        def span(s, sums):
            position, held = span_of(s, low, last)
            keys, values = load(
                kv, block_table, sequence[chunk], position, held, layer[0], kv_head, page
            )
            seen = position[None] <= row_position
            if window is not None:
                seen &= position[None] > row_position - window
            return attend(q, keys, values, seen, sums, options.scale)

        total, top, mass = lax.fori_loop(low // SPAN, last // SPAN + 1, span, no_sums(q))
        mass = plus_sinks(mass, top, head, head >= 0, per_layer)
        plgpu.store(out.at[at], (total / mass[:, None]).astype(out.dtype), mask=real)


def width(head_dim):
    """Columns of a tile that holds head_dim: a power of two, wide enough for a product."""
    return max(16, pl.next_power_of_2(head_dim))


def window_of(per_layer):
    """The layer's window; None: no layer has one."""
    if per_layer is None or per_layer.windows is None:
        return None
    return per_layer.windows[per_layer.index[0]]


def plus_sinks(mass, top, head, real, per_layer):
    """Masses [R] of queries `head` int32[R] with their sinks.

    - `top`: the largest score of each, in powers of two.
    - `real`: which heads exist.
    """
    if per_layer is None or per_layer.sinks is None:
        return mass
    sinks = plgpu.load(per_layer.sinks.at[per_layer.index[0], head], mask=real, other=0)
    return mass + power(sinks.astype(jnp.float32) * math.log2(math.e), top)


def first_seen(position, window):
    """The first position that a query at `position` sees."""
    return 0 if window is None else jnp.maximum(position - (window - 1), 0)


def span_of(s, low, last):
    """Positions of a span, and which of them are from low to last: only those are read."""
    position = s * SPAN + jnp.arange(SPAN)
    return position, (low <= position) & (position <= last)


def load(kv, block_table, sequence, position, held, layer, kv_head, page):
    """Keys and values [SPAN, width] of one KV head; zeros where `held` is false."""
    column = jnp.arange(width(page.head_dim))
    # Past the last token the table is undefined: neither it nor its pages are read.
    block = block_table.at[sequence, position // page.block_size]
    row = plgpu.load(block, mask=held, other=0) + layer * page.rows_per_layer
    # Added in this order it takes the fewest registers.
    row = (row + (kv_head * page.block_size + position % page.block_size))[:, None]
    mask = held[:, None] & (column < page.head_dim)[None]
    keys = plgpu.load(kv.at[row, column[None]], mask=mask, other=0)
    values = plgpu.load(kv.at[row + page.rows_to_value, column[None]], mask=mask, other=0)
    return keys, values


def no_sums(q):
    rows, width = q.shape
    empty = jnp.zeros((rows,), jnp.float32)
    return jnp.zeros((rows, width), jnp.float32), empty - jnp.inf, empty


def attend(q, keys, values, seen, sums, scale):
    """Adds a span to (total [M, width], top [M], mass [M]). A row that sees none of the span
    multiplies its sums by exactly 1 and adds zeros."""
    total, top, mass = sums
    scores = plgpu.dot(q, keys, trans_b=True) * (math.log2(math.e) * scale)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    shrink, p = power(top, new_top), power(scores, new_top[:, None])
    total = total * shrink[:, None] + plgpu.dot(p.astype(values.dtype), values)
    return total, new_top, mass * shrink + jnp.sum(p, axis=1)


def power(x, top):
    """2^(x − top); 0 where x and top are −inf, since nothing was seen yet."""
    return jnp.exp2(x - jnp.where(top == -jnp.inf, 0.0, top))
