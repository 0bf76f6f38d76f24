"""expert_ffn for decode: one program computes all of an expert's rows, 16 at a time.

A block is up to 64 tokens. The rows of a block that are routed to the expert are gathered into
tiles of 16, so that each weight tile is loaded once per block, and few rows make one product.

The experts are the slowest axis of both grids: a GPU starts programs in order, the first axis
fastest, so all that have work start before those of the places in `active` behind active_count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.tile import (
    DOWN,
    GATE,
    UP,
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

ROWS = 16
"""Rows of one product, whatever the number of tokens: a row's bits depend on it."""

BLOCK = 64
"""Tokens of a block: what one program's accumulators hold."""


class Sizes(NamedTuple):
    """How tokens and experts lie in h and in the grids."""

    block: int
    """Tokens of a block."""
    blocks: int
    slots: int
    """Most experts that are active."""

    @classmethod
    def of(cls, ids: jax.Array, experts: int) -> Sizes:
        """The sizes for these ids, as of expert_ffn. experts: that `active` has places for."""
        tokens, k = ids.shape
        block = min(BLOCK, max(ROWS, pl.next_power_of_2(tokens)))
        return cls(block, pl.cdiv(tokens, block), min(experts, tokens * k))

    @property
    def rows(self) -> int:
        """Those of h."""
        return self.slots * self.blocks * self.block


class Place(NamedTuple):
    """What a program computes: a block of tokens, a tile of columns, a place in `active`."""

    block: Any
    tile: Any
    slot: Any


def expert_ffn(y, x, ids, memory, active, active_count, *, formats, activation, gate_up, down):
    """The reference's function. memory: Memory of arrays; active_count: int32[1]; gate_up, down:
    Tile.

    Between the kernels h [min(E, T·K), T rounded up to a block, I] of x's dtype lies in memory:
    12.6 MB for 64 tokens of Qwen3-30B-A3B. More than 64 tokens read an expert once per block.
    """
    sizes, width = Sizes.of(ids, active.shape[0]), formats[0].cell.width
    h = triton_call(
        functools.partial(
            _gate_up, tile=gate_up, formats=formats, sizes=sizes, activation=activation
        ),
        name="expert_gate_up",
        grid=(sizes.blocks, pl.cdiv(width, gate_up.columns), sizes.slots),
        out_shape=jax.ShapeDtypeStruct((sizes.rows, width), x.dtype),
        num_warps=gate_up.num_warps,
        num_stages=gate_up.num_stages,
    )(memory, active, active_count, ids, x)
    return expert_down(y, h, ids, memory, active, active_count, formats=formats, down=down)


def expert_down(y, h, ids, memory, active, active_count, *, formats, down):
    """y with the rows of the active experts. h: of all of them, as gate_up leaves it."""
    sizes, hidden = Sizes.of(ids, active.shape[0]), y.shape[1]
    return triton_call(
        functools.partial(_down, tile=down, formats=formats, sizes=sizes),
        name="expert_down",
        grid=(sizes.blocks, pl.cdiv(hidden, down.columns), sizes.slots),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
        aliases={len(jax.tree.leaves(memory)) + 4: 0},
    )(memory, active, active_count, ids, h, y)


def _gate_up(
    memory: Memory,
    active_ref,
    count_ref,
    ids_ref,
    x_ref,
    h_ref,
    *,
    tile: Tile,
    formats: Formats,
    sizes: Sizes,
    activation: Callable[[jax.Array], jax.Array],
) -> None:
    """h = act(gate(x))·up(x) of one expert's rows in one block.

    Program (b, j, g) writes columns j of rows (g·blocks + b)·block … of h, and no other program
    does. Tiles without a routed row stay unwritten, and expert_down does not read them.
    """
    place = _own_place()

    @pl.when(place.slot < count_ref[0])
    def _active():
        operands = place, active_ref[place.slot], memory, ids_ref, x_ref, h_ref
        gate_up_of(*operands, tile=tile, formats=formats, sizes=sizes, activation=activation)


def gate_up_of(
    place: Place,
    expert: jax.Array,
    memory: Memory,
    ids_ref: Any,
    x_ref: Any,
    h_ref: Any,
    *,
    tile: Tile,
    formats: Formats,
    sizes: Sizes,
    activation: Callable[[jax.Array], jax.Array],
) -> None:
    """One tile of h, of this expert of `active`, if it has rows in the block."""
    column, first = place.tile * tile.columns, _first_row(place, sizes)
    tokens, k = ids_ref.shape

    def compute(record: Record, tiles: list[jax.Array]) -> None:
        # Places without a pair compute the last token; nobody reads the result.
        rows = [jnp.minimum(pairs // k, tokens - 1) for pairs in tiles]

        def add(planes: list[Plane], depth: int, totals: list) -> list:
            (start, end, _), _ = planes
            gate, up = (plane.weights().T for plane in planes)
            xs = [read_rows(x_ref, row, start, depth, end) for row in rows]
            return [
                (a + plgpu.dot(x, gate), b + plgpu.dot(x, up))
                for x, (a, b) in zip(xs, totals, strict=True)
            ]

        zero = jnp.zeros((ROWS, tile.columns), jnp.float32)
        totals = record.sum((GATE, UP), column, tile, add, [(zero, zero)] * len(tiles))
        for i, (a, b) in enumerate(totals):
            h = (activation(a) * b).astype(h_ref.dtype)
            write_rows(h_ref, span(first + i * ROWS, ROWS), column, h)

    _for_expert(compute, place, expert, memory, formats, ids_ref, sizes.block)


def _down(
    memory: Memory,
    active_ref,
    count_ref,
    ids_ref,
    h_ref,
    _,
    y_ref,
    *,
    tile: Tile,
    formats: Formats,
    sizes: Sizes,
) -> None:
    """y[t·K + k] = down(h) for one expert's rows in one block.

    Program (b, j, g) writes columns j of those rows t·K + k of y where t is in block b and
    ids[t, k] == active[g]. An expert is in `active` once, so no other program writes them; all
    other rows keep what they hold.
    """
    place = _own_place()
    column, first = place.tile * tile.columns, _first_row(place, sizes)

    def compute(record: Record, tiles: list[jax.Array]) -> None:
        places = [span(first + i * ROWS, ROWS) for i in range(len(tiles))]

        def add(planes: list[Plane], depth: int, totals: list) -> list:
            ((start, end, read),) = planes
            weights = read()
            hs = [read_rows(h_ref, rows, start, depth, end) for rows in places]
            return [a + plgpu.dot(h, weights) for h, a in zip(hs, totals, strict=True)]

        totals = [jnp.zeros((ROWS, tile.columns), jnp.float32)] * len(tiles)
        totals = record.sum((DOWN,), column, tile, add, totals)
        for pairs, total in zip(tiles, totals, strict=True):
            write_rows(y_ref, pairs, column, total, keep=pairs < y_ref.shape[0])

    @pl.when(place.slot < count_ref[0])
    def _active():
        expert = active_ref[place.slot]
        _for_expert(compute, place, expert, memory, formats, ids_ref, sizes.block)


def _own_place() -> Place:
    return Place(*(pl.program_id(axis) for axis in range(3)))


def _first_row(place: Place, sizes: Sizes) -> jax.Array:
    """Where a block and an expert lie in h."""
    return (place.slot * sizes.blocks + place.block) * sizes.block


def _for_expert(
    compute: Callable[[Record, list[jax.Array]], None],
    place: Place,
    expert: jax.Array,
    memory: Memory,
    formats: Formats,
    ids_ref: Any,
    block: int,
) -> None:
    """Runs compute(record, tiles) for an expert and a block, if it has rows there.

    tiles: int32[16] each, pairs t·K + k in ascending order; T·K where the tile has no more. One
    tile, or where 16 rows are not enough, all of a block's: each case is a loop without branches.
    """
    pairs, rank, routed = _routed(ids_ref, expert, place.block * block, block)

    def case(tiles: int) -> None:
        gathered = [_gather(pairs, rank, i * ROWS, ids_ref) for i in range(tiles)]
        memory.with_record(expert, formats, lambda record: compute(record, gathered))

    pl.when((routed > 0) & (routed <= ROWS))(lambda: case(1))
    if block > ROWS:
        pl.when(routed > ROWS)(lambda: case(block // ROWS))


def _routed(ids_ref, expert, start, block):
    """For each token of the block: its pair with the expert and the number of the block's pairs
    before it (−1: it has none); and the number of pairs, all int32."""
    tokens, k = ids_ref.shape
    slots = pl.next_power_of_2(k)
    token, slot = span(start, block)[:, None], span(0, slots)[None, :]
    ids = plgpu.load(
        ids_ref.at[pl.ds(start, block), pl.ds(0, slots)],
        mask=(token < tokens) & (slot < k),
        other=-1,
    )
    hit = ids == expert
    pairs = jnp.sum(jnp.where(hit, token * k + slot, 0), axis=1)
    routed = jnp.sum(hit.astype(jnp.int32), axis=1)
    return pairs, jnp.where(routed > 0, jnp.cumsum(routed) - 1, -1), jnp.sum(routed)


def _gather(pairs, rank, first, ids_ref):
    """int32[16]: the pairs of rank first, first + 1, …; T·K where there is none."""
    here = rank[None, :] == span(first, ROWS)[:, None]
    end = ids_ref.shape[0] * ids_ref.shape[1]
    return end + jnp.sum(jnp.where(here, (pairs - end)[None, :], 0), axis=1)
