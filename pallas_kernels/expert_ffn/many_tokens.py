"""expert_ffn for prefill: (token, slot) pairs sorted by expert, in tiles of 64 rows.

Programs go through all tiles of an expert before the next column, and through all its columns
before the next expert. So a weight tile is read from memory once for all of an expert's rows, and
these rows stay in the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.expert_ffn.activation import Gating
from pallas_kernels.expert_ffn.tile import (
    DOWN,
    Memory,
    Record,
    Tile,
    read_rows,
    span,
    write_rows,
)
from pallas_kernels.records.tile import Plane
from pallas_kernels.records.versions import Formats
from pallas_kernels.triton import triton_call

ROWS = 64
"""Rows of one product, whatever the number of tokens: a row's bits depend on it."""


SORTED = 256
"""Pairs in a block of the sort; within a block each pair is compared with all others."""


class Pairs(NamedTuple):
    """The pairs by expert, the same in all waves over a layer's experts; int32."""

    order: jax.Array
    """[T·K]: pairs t·K + k, ascending by expert, then by pair."""
    first: jax.Array
    """[E + 1]: where each expert's pairs begin in `order`."""


class Groups(NamedTuple):
    """The pairs by expert, and at most N tiles of the active experts; int32."""

    order: jax.Array
    """See Pairs."""
    first: jax.Array
    """See Pairs."""
    expert: jax.Array
    """[N]: a tile's expert, −1 past the last tile."""
    head: jax.Array
    """[N]: the first tile of the same expert."""
    tiles: jax.Array
    """[N]: how many tiles that expert has."""


def expert_ffn(y, memory, batch, *, formats, activation, gate_up, down):
    """expert_ffn of the api.

    - `memory`: Memory of arrays.
    - `batch`: as kernels take it.
    - `gate_up`, `down`: a Tile each.

    Between the kernels, h [64·N, I] is in memory, in x's dtype, N = T·K / 64 + min(E, T·K): 113 MB
    for 8192 tokens of Qwen3-30B-A3B, 484 MB of Mixtral-8x7B. An expert that is read through crosses
    the link once per tile of its rows, so the experts of a prefill step should have cells, in
    waves.
    """
    active, active_count, ids, x, pairs = batch
    pairs = sort_pairs(ids, memory.address.shape[1]) if pairs is None else pairs
    groups = group(pairs, active, jnp.arange(active.shape[0]) < active_count)
    most, width, hidden = len(groups.expert), formats[0].cell.width, x.shape[1]
    h = triton_call(
        functools.partial(
            _gate_up, tile=gate_up, formats=formats, slots=ids.shape[1], activation=activation
        ),
        name="expert_gate_up_sorted",
        grid=(most * pl.cdiv(width, gate_up.columns),),
        out_shape=jax.ShapeDtypeStruct((most * ROWS, width), x.dtype),
        num_warps=gate_up.num_warps,
        num_stages=gate_up.num_stages,
    )(memory, groups, x)
    return triton_call(
        functools.partial(_down, tile=down, formats=formats),
        name="expert_down_sorted",
        grid=(most * pl.cdiv(hidden, down.columns),),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
        aliases={len(jax.tree.leaves((memory, groups))) + 1: 0},
    )(memory, groups, h, y)


def sort_pairs(ids: jax.Array, experts: int) -> Pairs:
    """Sorts the pairs of ids [T, K] by expert. Padding has id E and comes last.

    A counting sort takes six launches; XLA's comparing sort of 65,536 pairs takes 18.
    """
    flat = ids.reshape(-1)
    pairs, edges = flat.shape[0], jnp.arange(experts + 1)
    first = jnp.sum(flat < edges[:, None], axis=1, dtype=jnp.int32)
    # A pair's place: pairs of lower experts, pairs of its expert in earlier blocks, and in its
    # block.
    blocks = jnp.pad(flat, (0, -pairs % SORTED), constant_values=experts).reshape(-1, SORTED)
    block, within = jnp.arange(blocks.shape[0]), jnp.arange(SORTED)
    of = jnp.sum(blocks[:, None] == edges[:, None], axis=2, dtype=jnp.int32)
    earlier = (block < block[:, None])[:, :, None]
    before = first + jnp.sum(jnp.where(earlier, of, 0), axis=1, dtype=jnp.int32)
    equal = (blocks[:, None] == blocks[:, :, None]) & (within < within[:, None])
    rank = jnp.sum(equal, axis=2, dtype=jnp.int32)
    place = (jnp.take_along_axis(before, blocks, axis=1, mode="clip") + rank).reshape(-1)[:pairs]
    order = jnp.zeros(pairs, jnp.int32)
    return Pairs(order.at[place].set(jnp.arange(pairs), unique_indices=True), first)


def group(pairs: Pairs, active: jax.Array, listed: jax.Array) -> Groups:
    """Cuts the pairs of the experts in `active` that are listed (bool[A]) into tiles."""
    order, first = pairs
    experts = first.shape[0] - 1
    expert = jnp.where(listed, active, 0)
    tiles = jnp.where(listed, pl.cdiv(first[expert + 1] - first[expert], ROWS), 0)
    end = jnp.cumsum(tiles)
    # Every tile except an expert's last is full.
    most = order.shape[0] // ROWS + min(experts, *active.shape, *order.shape)
    tile = jnp.arange(most)
    slot = jnp.sum(end <= tile[:, None], axis=1)
    inside = slot < active.shape[0]
    slot = jnp.minimum(slot, active.shape[0] - 1)
    return Groups(
        order,
        first,
        jnp.where(inside, expert[slot], -1),
        (end - tiles)[slot],
        tiles[slot],
    )


def _gate_up(
    memory: Memory,
    groups: Groups,
    x_ref,
    h_ref,
    *,
    tile: Tile,
    formats: Formats,
    slots: int,
    activation: Gating,
) -> None:
    """h = act(gate(x))·up(x) of the pairs of one tile.

    A program writes its columns of rows 64·n … 64·n + 63 of h, n its tile; no other program has
    the same tile and columns. Rows without a pair hold a copy of another row and are never read.
    """
    width = h_ref.shape[1]

    def compute(record: Record, n: jax.Array, column: jax.Array, pairs: jax.Array) -> None:
        rows = jnp.minimum(pairs, groups.order.shape[0] - 1) // slots

        def add(planes: list[Plane], depth: int, totals: list) -> list:
            (start, end, _), *_ = planes
            x = read_rows(x_ref, rows, start, depth, end)

            def product(weights: jax.Array) -> jax.Array:
                return plgpu.dot(weights, x.T) if record.lossy else plgpu.dot(x, weights.T)

            return [a + product(plane.weights()) for a, plane in zip(totals, planes, strict=True)]

        shape = (tile.columns, ROWS) if record.lossy else (ROWS, tile.columns)
        matrices, axis = record.first, 0 if record.lossy else 1
        zeros = [jnp.zeros(shape, jnp.float32)] * len(matrices)
        totals = record.sum(matrices, column, tile, add, zeros)
        sums = [record.add_bias(m, column, a, axis) for m, a in zip(matrices, totals, strict=True)]
        h = activation(sums[0], sums[-1]).astype(h_ref.dtype)
        write_rows(h_ref, span(n * ROWS, ROWS), column, h.T if record.lossy else h)

    _for_tile(compute, memory, formats, groups, width, tile.columns)


def _down(
    memory: Memory,
    groups: Groups,
    h_ref,
    _,
    y_ref,
    *,
    tile: Tile,
    formats: Formats,
) -> None:
    """y[pair] = down(h) for the pairs of one tile.

    A program writes its columns of the rows of y that are its tile's pairs: a pair is in one
    tile, and no other program has the same tile and columns. All other rows keep their values.
    """
    hidden = y_ref.shape[1]

    def compute(record: Record, n: jax.Array, column: jax.Array, pairs: jax.Array) -> None:
        rows = span(n * ROWS, ROWS)

        def add(planes: list[Plane], depth: int, total: jax.Array) -> jax.Array:
            ((start, end, read),) = planes
            weights = read()
            return total + plgpu.dot(read_rows(h_ref, rows, start, depth, end), weights)

        zero = jnp.zeros((ROWS, tile.columns), jnp.float32)
        total = record.add_bias(DOWN, column, record.sum((DOWN,), column, tile, add, zero))
        write_rows(y_ref, pairs, column, total, keep=pairs < y_ref.shape[0])

    _for_tile(compute, memory, formats, groups, hidden, tile.columns)


def _for_tile(
    compute: Callable[[Record, jax.Array, jax.Array, jax.Array], None],
    memory: Memory,
    formats: Formats,
    groups: Groups,
    size: int,
    columns: int,
) -> None:
    """Runs compute(record, n, column, pairs) for this program's tile n and its `size` columns from
    `column` on.

    `pairs` is int32[64], T·K for rows past the expert's last pair. `memory` and `groups` hold refs.
    """
    program, across = pl.program_id(0), pl.cdiv(size, columns)
    some = program // across  # a tile of the same expert: each has `across` programs
    expert = groups.expert[some]

    @pl.when(expert >= 0)
    def _active():
        head, tiles = groups.head[some], groups.tiles[some]
        within = program - head * across
        n, column = head + within % tiles, within // tiles * columns
        place = groups.first[expert] + span((n - head) * ROWS, ROWS)
        end = groups.order.shape[0]
        pairs = groups.order[jnp.minimum(place, end - 1)]
        pairs = jnp.where(place < groups.first[expert + 1], pairs, end)
        memory.with_record(expert, formats, lambda record: compute(record, n, column, pairs))
