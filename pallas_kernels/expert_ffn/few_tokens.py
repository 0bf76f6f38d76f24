"""expert_ffn for decode: one program computes all of an expert's rows, 16 at a time.

A block is up to 64 tokens. The rows of a block that are routed to the expert are gathered into
tiles of 16, so that each weight tile is loaded once per block, and few rows make one product.

The experts are the slowest axis of both grids. A GPU starts programs in order, the first axis
fastest, so all programs with work start before those of unused places in `active`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.combine.pallas_triton import SQUARES_TILE, move_on, squares_of, weighted_sum
from pallas_kernels.expert_ffn.activation import Gating
from pallas_kernels.expert_ffn.epilogue import MOST_SLOTS, Combined, combine_behind
from pallas_kernels.expert_ffn.operands import ExpertBatch
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
from pallas_kernels.triton import are_last, triton_call

ROWS = 16
"""Rows of one product, whatever the number of tokens: a row's bits depend on it."""

BLOCK = 64
"""Tokens of a block: what one program's accumulators hold."""


COMBINING = ("dense", "int4")
"""Versions whose down also combines, if all experts have that version. int8 spills at 32 rows, and
fewer of its programs fit a multiprocessor of an H200; int2 spills at 64 rows; lossless12 and
mixtures are untried."""


class Sizes(NamedTuple):
    """Sizes of h and of the grids."""

    block: int
    """Tokens of a block."""
    blocks: int
    slots: int
    """The largest number of active experts."""

    @classmethod
    def of(cls, batch: ExpertBatch) -> Sizes:
        tokens, k = batch.ids.shape
        block = min(BLOCK, max(ROWS, pl.next_power_of_2(tokens)))
        return cls(block, pl.cdiv(tokens, block), min(batch.active.shape[0], tokens * k))

    @property
    def rows(self) -> int:
        """Rows of h."""
        return self.slots * self.blocks * self.block


class Place(NamedTuple):
    """The work of a program: a block of tokens, a tile of columns, a place in `active`."""

    block: Any
    tile: Any
    slot: Any


def expert_ffn(y, memory, batch, epilogue=None, *, formats, activation, gate_up, down):
    """expert_ffn of the api.

    - `memory`: Memory of arrays.
    - `batch`: as kernels take it.
    - `gate_up`, `down`: a Tile each.

    Between the kernels, h [min(E, T·K), T rounded up to a block, I] is in memory, in x's dtype:
    12.6 MB for 64 tokens of Qwen3-30B-A3B. More than 64 tokens read an expert once per block.
    """
    sizes, width = Sizes.of(batch), formats[0].cell.width
    h = triton_call(
        functools.partial(_gate_up, tile=gate_up, formats=formats, activation=activation),
        name="expert_gate_up",
        grid=(sizes.blocks, pl.cdiv(width, gate_up.columns), sizes.slots),
        out_shape=jax.ShapeDtypeStruct((sizes.rows, width), batch.x.dtype),
        num_warps=gate_up.num_warps,
        num_stages=gate_up.num_stages,
    )(memory, batch)
    return expert_down(y, h, memory, batch, epilogue, formats=formats, down=down)


def expert_down(y, h, memory, batch, epilogue=None, *, formats, down):
    """y with the rows of the active experts, or Combined if there is an epilogue.

    - `h`: what gate_up wrote for all of them.
    """
    sizes, hidden = Sizes.of(batch), y.shape[1]
    given = {"tile": down, "formats": formats}
    # What down reads of tokens are their rows of h.
    operands, changed = (memory, batch._replace(x=h), y), y
    place = len(jax.tree.leaves(operands)) - 1
    within = epilogue is not None and _combines(formats, batch.ids.shape[1], down.columns, hidden)
    if epilogue is not None and within:
        residual, weights, index, counters, first_layer, with_squares = epilogue
        if memory.layer.shape[0] == 1:
            operands = memory._replace(layer=None), *operands[1:]
        place = len(jax.tree.leaves(operands)) - 1
        kernel = functools.partial(_down_and_combine, **given, first_layer=first_layer)
        operands += ((residual, weights, index, counters),)
        tiles = len(residual), pl.cdiv(hidden, SQUARES_TILE)
        squares: Any = jax.ShapeDtypeStruct(tiles, jnp.float32) if with_squares else None
        changed = Combined(y, residual, index, counters, squares)
    else:
        kernel = functools.partial(_down, **given)
    (found,) = triton_call(
        kernel,
        name="expert_down_combine" if within else "expert_down",
        grid=(sizes.blocks, pl.cdiv(hidden, down.columns), sizes.slots),
        out_shape=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (changed,)),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
        aliases={place: 0} | ({place + 3: 2, place + 4: 3} if within else {}),
    )(*operands)
    return found if within or epilogue is None else combine_behind(found, epilogue, "pallas")


def _combines(formats: Formats, top_k: int, columns: int, hidden: int) -> bool:
    """Whether down also combines if there is an epilogue. columns: of a program."""
    versions = {fmt.version for cell, held, _ in formats for fmt in (cell, held)}
    taken = len(versions) == 1 and versions <= set(COMBINING) and top_k <= MOST_SLOTS
    return taken and (columns % SQUARES_TILE == 0 or columns >= hidden)


def _gate_up(
    memory: Memory,
    batch: ExpertBatch,
    h_ref,
    *,
    tile: Tile,
    formats: Formats,
    activation: Gating,
) -> None:
    """h = act(gate(x))·up(x) of one expert's rows in one block.

    Program (b, j, g) writes columns j of rows (g·blocks + b)·block … of h, and no other program
    does. Tiles without a routed row stay unwritten, and expert_down does not read them.
    """
    place = _own_place()

    @pl.when(place.slot < batch.active_count[0])
    def _active():
        operands = place, batch.active[place.slot], memory, batch, h_ref
        gate_up_of(*operands, tile=tile, formats=formats, activation=activation)


def gate_up_of(
    place: Place,
    expert: jax.Array,
    memory: Memory,
    batch: ExpertBatch,
    h_ref: Any,
    *,
    tile: Tile,
    formats: Formats,
    activation: Gating,
) -> None:
    """One tile of h, of this expert of `active`, if it has rows in the block."""
    column, first = place.tile * tile.columns, _first_row(place, batch)
    tokens, k = batch.ids.shape

    def compute(record: Record, tiles: list[jax.Array]) -> None:
        # Places without a pair compute the last token; their result is never read.
        rows = [jnp.minimum(pairs // k, tokens - 1) for pairs in tiles]

        def add(planes: list[Plane], depth: int, totals: list) -> list:
            (start, end, _), *_ = planes
            every = [plane.weights().T for plane in planes]
            xs = [read_rows(batch.x, row, start, depth, end) for row in rows]
            return [
                [a + plgpu.dot(x, weights) for a, weights in zip(of_x, every, strict=True)]
                for x, of_x in zip(xs, totals, strict=True)
            ]

        matrices = record.first
        zeros = [jnp.zeros((ROWS, tile.columns), jnp.float32)] * len(matrices)
        totals = record.sum(matrices, column, tile, add, [zeros] * len(tiles))
        for i, of_x in enumerate(totals):
            sums = [record.add_bias(m, column, a) for m, a in zip(matrices, of_x, strict=True)]
            h = activation(sums[0], sums[-1]).astype(h_ref.dtype)
            write_rows(h_ref, span(first + i * ROWS, ROWS), column, h)

    _for_expert(compute, place, expert, memory, formats, batch)


def _down(memory: Memory, batch: ExpertBatch, _, y_ref, *, tile: Tile, formats: Formats) -> None:
    """y[t·K + k] = down(h) for one expert's rows in one block.

    Program (b, j, g) writes columns j of those rows t·K + k of y where t is in block b and
    ids[t, k] == active[g]. An expert is in `active` once, so no other program writes them; all
    other rows keep what they hold.
    """
    place = _own_place()

    @pl.when(place.slot < batch.active_count[0])
    def _active():
        operands = place, batch.active[place.slot], memory, batch, y_ref
        _down_of(*operands, tile=tile, formats=formats)


def _down_of(
    place: Place,
    expert: jax.Array,
    memory: Memory,
    batch: ExpertBatch,
    y_ref: Any,
    *,
    tile: Tile,
    formats: Formats,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One tile of columns of y, for this expert's rows in the block. Returns what _routed does."""
    column, first = place.tile * tile.columns, _first_row(place, batch)

    def compute(record: Record, tiles: list[jax.Array]) -> None:
        places = [span(first + i * ROWS, ROWS) for i in range(len(tiles))]

        def add(planes: list[Plane], depth: int, totals: list) -> list:
            ((start, end, read),) = planes
            weights = read()
            hs = [read_rows(batch.x, rows, start, depth, end) for rows in places]
            return [a + plgpu.dot(h, weights) for h, a in zip(hs, totals, strict=True)]

        totals = [jnp.zeros((ROWS, tile.columns), jnp.float32)] * len(tiles)
        totals = record.sum((DOWN,), column, tile, add, totals)
        for pairs, total in zip(tiles, totals, strict=True):
            total = record.add_bias(DOWN, column, total)
            write_rows(y_ref, pairs, column, total, keep=pairs < y_ref.shape[0])

    return _for_expert(compute, place, expert, memory, formats, batch)


def _down_and_combine(
    memory: Memory,
    batch: ExpertBatch,
    _y,
    given: tuple[Any, ...],
    to: Combined,
    *,
    tile: Tile,
    formats: Formats,
    first_layer: int,
) -> None:
    """_down, which also writes the weighted sum of each token whose last expert this program
    computes.

    - `given`: residual and weights, then the arrays that are updated in place.

    With J tiles of columns, program (b, j, g) writes rows of y as _down does, and sets bit k of
    counters[t·J + j] for each of them. The program that sets the last of a token's K bits reads
    columns j of the token's rows of y and writes out[t] there, and the squares if there is such an
    array. Programs (b, j, 0) write padding, which no expert computes. Each program adds the number
    of tokens that it combined to the last counter. The program that completes T·J increments the
    index; all readers of the index are done by then.
    """
    y_ref, out_ref, index_ref, counters_ref, squares_ref = to
    place, experts, block = _own_place(), memory.address.shape[1], Sizes.of(batch).block
    if memory.layer is None:
        memory = memory._replace(layer=_Layer(index_ref, first_layer))
    ids: Any = batch.ids
    (tokens, k), tiles = ids.shape, pl.cdiv(y_ref.shape[1], tile.columns)

    def routed():
        operands = place, batch.active[place.slot], memory, batch, y_ref
        pairs, rank, number = _down_of(*operands, tile=tile, formats=formats)

        def completed(i, _):
            mine = _gather(pairs, rank, i * ROWS, ids)
            mask = mine < tokens * k
            at = jnp.where(mask, mine // k * tiles + place.tile, tokens * tiles)
            last = are_last(counters_ref, at, 1 << mine % k, (1 << k) - 1, mask)
            combine(mine // k, last)

        lax.fori_loop(0, pl.cdiv(number, ROWS), completed, None)

    def padding(i, _):
        token = place.block * block + span(i * ROWS, ROWS)
        first = plgpu.load(ids.at[token, 0], mask=token < tokens, other=0)
        combine(token, first >= experts)

    def combine(token: jax.Array, mask: jax.Array) -> None:
        number = jnp.sum(mask.astype(jnp.int32))

        @pl.when(number > 0)
        def _():
            squares = () if squares_ref is None else (squares_ref,)
            operands = y_ref, *given[:2], out_ref, *squares
            _combine_rows(token, mask, place.tile * tile.columns, tile.columns, *operands)
            every = jnp.int32(tokens * tiles)
            at = every + place.tile * 0  # traced, for Pallas's interpreter
            before = plgpu.atomic_add(counters_ref, (at,), number)

            @pl.when(before + number == every)
            def _():
                move_on(index_ref)
                counters_ref[at] = jnp.int32(0)

    # A program without rows does not read the index, which may already have been incremented.
    pl.when(place.slot < batch.active_count[0])(routed)
    pl.when(place.slot == 0)(lambda: lax.fori_loop(0, block // ROWS, padding, None))


class _Layer:
    """The layer's number as Memory holds it: an index plus an offset."""

    shape = (1,)

    def __init__(self, index: Any, first_layer: int):
        self._index, self._first = index, first_layer

    def __getitem__(self, at: int) -> jax.Array:
        return self._index[at] + self._first


def _combine_rows(
    token: jax.Array,
    mask: jax.Array,
    column: Any,
    columns: int,
    y_ref: Any,
    residual_ref: Any,
    weights_ref: Any,
    out_ref: Any,
    *squares_ref: Any,
) -> None:
    """Writes columns of out and of its squares, for tokens where the mask is true."""
    k, across = weights_ref.shape[1], span(column, columns)
    inside = jnp.broadcast_to(mask[:, None], (ROWS, columns))
    if out_ref.shape[1] % columns:
        inside &= across < out_ref.shape[1]

    def load(ref, rows):
        return plgpu.load(ref.at[rows[:, None], across[None, :]], mask=inside, other=0)

    def part(slot):
        weight = plgpu.load(weights_ref.at[token, slot], mask=mask, other=0)
        return load(y_ref, token * k + slot), weight[:, None]

    total = weighted_sum(map(part, range(k)), lambda: load(residual_ref, token))
    result = total.astype(out_ref.dtype)
    plgpu.store(out_ref.at[token[:, None], across[None, :]], result, mask=inside)
    for to in squares_ref:  # of what is stored; zeros behind the last column
        tiles, squares = squares_of(result, column)
        there = mask[:, None] & (tiles < to.shape[1])[None, :]
        plgpu.store(to.at[token[:, None], tiles[None, :]], squares, mask=there)


def _own_place() -> Place:
    return Place(*(pl.program_id(axis) for axis in range(3)))


def _first_row(place: Place, batch: ExpertBatch) -> jax.Array:
    """The first row of h for a block and an expert."""
    sizes = Sizes.of(batch)
    return (place.slot * sizes.blocks + place.block) * sizes.block


def _for_expert(
    compute: Callable[[Record, list[jax.Array]], None],
    place: Place,
    expert: jax.Array,
    memory: Memory,
    formats: Formats,
    batch: ExpertBatch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs compute(record, tiles) for an expert and a block, if the expert has rows there. Returns
    what _routed does.

    `tiles` are int32[16] each: pairs t·K + k in ascending order, T·K past the last pair. There is
    one tile, or, if 16 rows are not enough, all tiles of a block, so that both cases are loops
    without branches.
    """
    block = Sizes.of(batch).block
    pairs, rank, routed = _routed(batch.ids, expert, place.block * block, block)

    def case(tiles: int) -> None:
        gathered = [_gather(pairs, rank, i * ROWS, batch.ids) for i in range(tiles)]
        memory.with_record(expert, formats, lambda record: compute(record, gathered))

    pl.when((routed > 0) & (routed <= ROWS))(lambda: case(1))
    if block > ROWS:
        pl.when(routed > ROWS)(lambda: case(block // ROWS))
    return pairs, rank, routed


def _routed(ids_ref, expert, start, block):
    """For each token of the block, its pair with the expert and the number of earlier pairs in the
    block (−1: it has no pair); then the number of pairs. All int32."""
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
    """int32[16]: the pairs of rank first, first + 1, …; T·K past the last one."""
    here = rank[None, :] == span(first, ROWS)[:, None]
    end = ids_ref.shape[0] * ids_ref.shape[1]
    return end + jnp.sum(jnp.where(here, (pairs - end)[None, :], 0), axis=1)
