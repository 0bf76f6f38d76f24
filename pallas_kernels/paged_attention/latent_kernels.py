"""The bodies of attention's kernels over latent pages.

A row of a page is both key and value, so it is read once, in parts whose widths are powers of two.
All parts except the last also belong to the value. Softmax is computed in powers of two.
"""

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.paged_attention.kernels import (
    first_seen,
    plus_sinks,
    power,
    tile_of_prefill,
    window_of,
)


def split(q, kv, block_table, lengths, layer, per_layer, sums, *, options, config):
    """Softmax sums of a tile of one sequence's queries over one split of its tokens.

    Writes: program (t, i, split) alone writes [t, head tile i, split] of totals, tops and masses.
    Splits that no query sees are not written.
    """
    t, tile, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, page = lengths[t], options.page
    low, begin = first_seen(length - 1, window_of(per_layer)), split * config.split
    end = jnp.minimum(begin + config.split, length)

    @pl.when((begin < length) & (begin + config.split > low))
    def _():
        head = tile * config.rows + jnp.arange(config.rows)
        real = head < q[0].shape[1]
        queries = _queries(q, t, head, real, page, config)

        def span(s, sums):
            position, held = _span(s, low, length - 1, config)
            keys = _load(kv, block_table, t, position, held, layer[0], page, config)
            return _attend(queries, keys, held[None], sums, options.scale)

        first = jnp.maximum(begin, low) // config.span
        none = _no_sums(page, config)
        *parts, top, mass = lax.fori_loop(first, pl.cdiv(end, config.span), span, none)
        for column, total in zip(_value_columns(page, config), parts, strict=True):
            mask = real[:, None] & (column < page.latent)[None]
            plgpu.store(sums.totals.at[t, head[:, None], split, column[None]], total, mask=mask)
        plgpu.store(sums.tops.at[t, head, split], top, mask=real)
        plgpu.store(sums.masses.at[t, head, split], mass, mask=real)


def prefill(q, kv, block_table, chunks, layer, per_layer, out, *, options, config):
    """Causal attention of a tile of one chunk's queries and heads.

    Writes: program (tile, i) alone writes out[the tile's rows, head tile i], padding included.
    Tiles without a real row are not written.
    """
    sequence, start, length, count = chunks
    page, window = options.page, window_of(per_layer)
    chunk_rows = q[0].shape[0] // sequence.shape[0]
    queries = config.rows // config.heads
    chunk, first_query = tile_of_prefill(chunk_rows, queries)
    heads_tile = pl.program_id(1)

    @pl.when((chunk < count[0]) & (first_query < length[chunk]))
    def _():
        row = jnp.arange(config.rows)
        query = first_query + row // config.heads
        head = heads_tile * config.heads + row % config.heads
        real, token = query < chunk_rows, chunk * chunk_rows + query
        of_tile = _queries(q, token, head, real, page, config)

        # Padding rows repeat the last real position, so they look at no page that is not there.
        row_position = (start[chunk] + jnp.minimum(query, length[chunk] - 1))[:, None]
        low = first_seen(start[chunk] + first_query, window)
        last = start[chunk] + jnp.minimum(first_query + queries, length[chunk]) - 1

        def span(s, sums):
            position, held = _span(s, low, last, config)
            keys = _load(kv, block_table, sequence[chunk], position, held, layer[0], page, config)
            seen = position[None] <= row_position
            if window is not None:
                seen &= position[None] > row_position - window
            return _attend(of_tile, keys, seen, sums, options.scale)

        spans = low // config.span, last // config.span + 1
        *parts, top, mass = lax.fori_loop(*spans, span, _no_sums(page, config))
        mass = plus_sinks(mass, top, head, head >= 0, per_layer)
        for column, total in zip(_value_columns(page, config), parts, strict=True):
            mask = real[:, None] & (column < page.latent)[None]
            attended = (total / mass[:, None]).astype(out.dtype)
            plgpu.store(out.at[token[:, None], head[:, None], column[None]], attended, mask=mask)


def _value_columns(page, config):
    """The columns of each part that belong to the value."""
    parts = pl.cdiv(page.latent, config.part)
    return [i * config.part + jnp.arange(config.part) for i in range(parts)]


def _key_columns(page):
    """The columns after the latent, padded for a product, and which of them are real."""
    rope = page.head_dim - page.latent
    column = jnp.arange(max(16, pl.next_power_of_2(rope)))
    return column, column < rope


def _queries(q, token, head, real, page, config):
    """A tile of queries, cut like keys. token, head: of each row. real: which rows exist."""
    (q_in, q_rope), parts = q, []
    token, head = jnp.broadcast_to(token, head.shape)[:, None], head[:, None]
    for column in _value_columns(page, config):
        mask = real[:, None] & (column < page.latent)[None]
        parts.append(plgpu.load(q_in.at[token, head, column[None]], mask=mask, other=0))
    column, held = _key_columns(page)
    mask = real[:, None] & held[None]
    return [*parts, plgpu.load(q_rope.at[token, head, column[None]], mask=mask, other=0)]


def _span(s, low, last, config):
    """Positions of a span, and which of them are from low to last: only those are read."""
    position = s * config.span + jnp.arange(config.span)
    return position, (low <= position) & (position <= last)


def _load(kv, block_table, sequence, position, held, layer, page, config):
    """Rows [span, part] of a latent page, part by part; zeros where `held` is false."""
    # Past the last token the table is undefined: neither it nor its pages are read.
    block = block_table.at[sequence, position // page.block_size]
    row = plgpu.load(block, mask=held, other=0) + layer * page.rows_per_layer
    row = (row + position % page.block_size)[:, None]
    parts = []
    for column in _value_columns(page, config):
        mask = held[:, None] & (column < page.latent)[None]
        parts.append(plgpu.load(kv.at[row, column[None]], mask=mask, other=0))
    column, real = _key_columns(page)
    mask = held[:, None] & real[None]
    return [*parts, plgpu.load(kv.at[row, page.latent + column[None]], mask=mask, other=0)]


def _no_sums(page, config):
    empty = jnp.zeros((config.rows,), jnp.float32)
    total = jnp.zeros((config.rows, config.part), jnp.float32)
    return (*(total for _ in _value_columns(page, config)), empty - jnp.inf, empty)


def _attend(q, keys, seen, sums, scale):
    """Adds a span to (totals [M, part] ..., top [M], mass [M]). A row that sees none of the span
    multiplies its sums by exactly 1 and adds zeros."""
    *totals, top, mass = sums
    products = [plgpu.dot(a, b, trans_b=True) for a, b in zip(q, keys, strict=True)]
    scores = functools.reduce(operator.add, products) * (math.log2(math.e) * scale)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    shrink, p = power(top, new_top), power(scores, new_top[:, None])
    weights, values = p.astype(keys[0].dtype), keys[: len(totals)]
    totals = [
        total * shrink[:, None] + plgpu.dot(weights, value)
        for total, value in zip(totals, values, strict=True)
    ]
    return (*totals, new_top, mass * shrink + jnp.sum(p, axis=1))
