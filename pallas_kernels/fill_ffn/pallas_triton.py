"""fill_ffn as Triton kernels that copy records and compute experts beside each other.

    1. copies gate and up of the missing experts, beside gate_up of all others;
    2. copies down of the missing experts, beside gate_up of those;
    3. expert_down of all.

The link is busy throughout 1 and 2, and what is left behind it is one product. Records that are
not dense, whose parts lie otherwise, are copied whole in 1. The programs that copy come first in
each grid. Nothing synchronises them with the others: each launch computes what the one before has
copied. Tiles, and with them the bits, are expert_ffn's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn import ACTIVATIONS, Epilogue, few_tokens
from pallas_kernels.expert_ffn.pallas_triton import configuration_of, in_kernels, memory_of
from pallas_kernels.expert_ffn.tile import Memory, Tile
from pallas_kernels.fill_ffn.versions import why_not_pallas
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import Formats
from pallas_kernels.triton import edge_mask, scalar, tile_mask, triton_call

CHUNK = 4096
"""Elements that a program copies at a time (8 KiB): 4 loads of 128 bits by each of 128 threads.
With 8 or with 2, ptxas spills registers of the products of 64 rows (H200)."""

COPIES = {99: 16, 163: 16, 227: 32}
"""Class of GPU → programs that copy, at most. A link of 48 GB/s and 2 µs has 96 KB under way, one
of 25 GB/s half; so many chunks are 2.6 times that (assumed: no probe had as few). Each keeps the
place of a program that computes, of which a device has one or two a multiprocessor."""

LATE = 32
"""Programs that compute the missing experts, in turns, beside the second part of the copies, which
takes longer; where nothing is missing they end at once."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a kernel's code, besides shapes."""

    gate_up: Tile
    down: Tile
    copies: int
    late: int


def configuration(x: jax.Array, formats: Formats, row_tile: int, shared_kib: int) -> Config:
    """The tiles of expert_ffn. Raises ValueError for what the kernels do not take."""
    config = configuration_of(x, formats, row_tile, shared_kib)
    if config.rows != few_tokens.ROWS:
        raise ValueError(
            f"fill_ffn 'pallas' has products of {few_tokens.ROWS} rows, not {row_tile}; 'xla' has"
        )
    why = why_not_pallas((cell.version, held.version) for cell, held, _ in formats)
    if why is not None:
        raise ValueError(f"fill_ffn 'pallas': {why}; 'xla' takes it")
    return Config(config.gate_up, config.down, COPIES[shared_kib], LATE)


class Moves(NamedTuple):
    """What is filled, as of fill; count: int32[1]."""

    expert: Any
    row: Any
    version: Any
    count: Any


def fill_ffn(
    y,
    x,
    ids,
    arena,
    stores,
    layer,
    address,
    version,
    active,
    active_count,
    fill_expert,
    fill_row,
    fill_version,
    fill_count,
    *,
    formats,
    activation,
    row_tile,
    shared_kib: int = CLASSES[-1],
    epilogue: Epilogue | None = None,
):
    config = configuration(x, formats, row_tile, shared_kib)
    memory = memory_of(arena, stores, layer, address, version, formats, x.dtype)
    moves = Moves(fill_expert, fill_row, fill_version, scalar(fill_count))
    active_count = scalar(active_count)
    operands = active, active_count, ids, x, moves
    launch = functools.partial(
        _launch, config=config, formats=formats, activation=in_kernels(ACTIVATIONS[activation])
    )
    memory, h = launch(memory, None, *operands, late=False)
    memory, h = launch(memory, h, *operands, late=True)
    operands = y, h, ids, memory, active, active_count, epilogue
    y = few_tokens.expert_down(*operands, formats=formats, down=config.down)
    view = memory.coded if memory.dense is None else memory.dense
    return lax.bitcast_convert_type(view, arena.dtype), y


def _launch(memory, h, active, active_count, ids, x, moves, *, config, formats, activation, late):
    """(memory with the arena after the copies, h). late: the second launch."""
    sizes = few_tokens.Sizes.of(ids, active.shape[0])
    width = formats[0].cell.width
    tiles = pl.cdiv(width, config.gate_up.columns)
    parts = [_part(cell, late) for cell, _, _ in formats]
    chunks = _Chunks.of(parts, x.shape[1])
    # The first of each block of tokens.
    copies = pl.cdiv(min(config.copies, moves.expert.shape[0] * chunks.number), sizes.blocks)
    items = tiles * sizes.slots
    view = memory.coded if memory.dense is None else memory.dense
    without = memory._replace(dense=None, coded=None)
    operands = without, active, active_count, ids, x, moves, view
    place = len(jax.tree.leaves(operands)) - 1
    view, h = triton_call(
        functools.partial(
            _late if late else _early,
            dense=memory.dense is not None,
            chunks=chunks,
            copies=copies,
            tiles=tiles,
            gate_up=functools.partial(
                few_tokens.gate_up_of,
                tile=config.gate_up,
                formats=formats,
                sizes=sizes,
                activation=activation,
            ),
            sizes=sizes,
        ),
        name="expert_gate_up_filled" if late else "expert_gate_up_hits",
        grid=(sizes.blocks, copies + (min(config.late, items) if late else items)),
        out_shape=(
            jax.ShapeDtypeStruct(view.shape, view.dtype),
            jax.ShapeDtypeStruct((sizes.rows, width), x.dtype),
        ),
        num_warps=config.gate_up.num_warps,
        num_stages=config.gate_up.num_stages,
        aliases={place: 0, place + 1: 1} if late else {place: 0},
    )(*operands, *([h] if late else []))
    return memory._replace(**{"coded" if memory.dense is None else "dense": view}), h


def _part(fmt: RecordFormat, late: bool) -> tuple[int, int]:
    """The first row and the rows of a record that one of the launches copies."""
    first = fmt.parts["down"][0] if fmt.version == "dense" else fmt.rows
    return (first, fmt.rows - first) if late else (0, first)


class _Chunks(NamedTuple):
    """How the parts of records are cut: rows × columns elements, the last ones masked."""

    parts: tuple[tuple[int, int], ...]
    """Those of each version: the first row of a record, and how many."""
    rows: int
    columns: int
    across: int
    """Chunks beside each other."""
    number: int
    """Chunks of the longest part."""

    @classmethod
    def of(cls, parts: list[tuple[int, int]], hidden: int) -> _Chunks:
        columns = min(pl.next_power_of_2(hidden), CHUNK)
        rows, across = CHUNK // columns, pl.cdiv(hidden, columns)
        number = max(pl.cdiv(length, rows) for _, length in parts) * across
        return cls(tuple(parts), rows, columns, across, number)


def _early(
    memory: Memory,
    active: Any,
    active_count: Any,
    ids: Any,
    x: Any,
    moves: Moves,
    _,
    arena: Any,
    h: Any,
    *,
    dense: bool,
    chunks: _Chunks,
    copies: int,
    tiles: int,
    gate_up: Callable[..., None],
    sizes: few_tokens.Sizes,
) -> None:
    """Programs below `copies` copy the first parts of records; each of the others has one tile of h
    of one place in `active`, whose expert is not filled.

    Writes: a chunk of a cell that is filled, by one program; a tile of h, by one program. Reads:
    cells of active experts that are not filled, and the stores. A plan fills no cell of an active
    expert, so nobody reads what another program writes.
    """
    block, program = pl.program_id(0), pl.program_id(1)
    _copy((block, program), copies, sizes, memory, moves, arena, chunks)

    @pl.when(program >= copies)
    def _computes():
        place = _place(block, program - copies, tiles)

        @pl.when(place.slot < active_count[0])
        def _active():
            expert = active[place.slot]

            @pl.when(~_is_filled(expert, moves))
            def _hit():
                gate_up(place, expert, _with_arena(memory, arena, dense), ids, x, h)


def _late(
    memory: Memory,
    active: Any,
    active_count: Any,
    ids: Any,
    x: Any,
    moves: Moves,
    _arena,
    _h,
    arena: Any,
    h: Any,
    *,
    dense: bool,
    chunks: _Chunks,
    copies: int,
    tiles: int,
    gate_up: Callable[..., None],
    sizes: few_tokens.Sizes,
) -> None:
    """Programs below `copies` copy what is left of the records; the others take the tiles of h of
    the experts that are filled in turns.

    Writes: a chunk of down of a cell that is filled, by one program; a tile of h, by one program.
    Reads: gate and up of those cells, which the launch before has copied. Records that are not
    dense have nothing left to copy.
    """
    block, program = pl.program_id(0), pl.program_id(1)
    _copy((block, program), copies, sizes, memory, moves, arena, chunks)

    @pl.when(program >= copies)
    def _computes():
        first, programs = program - copies, pl.num_programs(1) - copies

        def turn(n, _):
            place = _place(block, n * programs + first, tiles)
            expert = moves.expert[place.slot]
            place = place._replace(slot=_slot(expert, active, active_count))
            gate_up(place, expert, _with_arena(memory, arena, dense), ids, x, h)

        lax.fori_loop(0, _turns(moves.count[0] * tiles, first, programs), turn, None)


def _place(block: jax.Array, number: jax.Array, tiles: int) -> few_tokens.Place:
    """Tiles, then experts."""
    return few_tokens.Place(block, lax.rem(number, tiles), lax.div(number, tiles))


def _with_arena(memory: Memory, arena: Any, dense: bool) -> Memory:
    return memory._replace(dense=arena) if dense else memory._replace(coded=arena)


def _turns(items: jax.Array, first: jax.Array, programs: int | jax.Array) -> jax.Array:
    """How many of the items first, first + programs, … there are."""
    return lax.div(items - first + programs - 1, programs)


def _is_filled(expert: jax.Array, moves: Moves) -> jax.Array:
    """bool: whether the expert is among the moves."""
    entry = jnp.arange(pl.next_power_of_2(moves.expert.shape[0]))
    others = plgpu.load(moves.expert.at[entry], mask=entry < moves.count[0], other=-1)
    return jnp.max((others == expert).astype(jnp.int32)) > 0


def _slot(expert: jax.Array, active: Any, count: Any) -> jax.Array:
    """The expert's place in `active`, which is ascending."""
    place = jnp.arange(pl.next_power_of_2(active.shape[0]))
    inside = place < jnp.minimum(count[0], active.shape[0])
    others = plgpu.load(active.at[place], mask=inside, other=jnp.iinfo(jnp.int32).max)
    return jnp.sum((others < expert).astype(jnp.int32))


def _copy(
    at: tuple[jax.Array, jax.Array],
    copies: int,
    sizes: few_tokens.Sizes,
    memory: Memory,
    moves: Moves,
    arena: Any,
    chunks: _Chunks,
) -> None:
    """What programs below `copies` of each block do. at: the program's (block, number)."""
    if not copies:
        return
    block, program = at

    @pl.when(program < copies)
    def _copies():
        number = program * sizes.blocks + block
        _copy_chunks(number, copies * sizes.blocks, memory, moves, arena, chunks)


def _copy_chunks(
    program: jax.Array, programs: int, memory: Memory, moves: Moves, arena: Any, chunks: _Chunks
) -> None:
    """Chunks program, program + programs, … of all entries' chunks, entry after entry."""
    rows, columns, hidden = chunks.rows, chunks.columns, arena.shape[1]

    def copy(turn, _):
        number = turn * programs + program
        entry, chunk = lax.div(number, chunks.number), lax.rem(number, chunks.number)
        down = lax.div(chunk, chunks.across) * rows
        column = lax.rem(chunk, chunks.across) * columns
        for v, (store, (first, length)) in enumerate(zip(memory.stores, chunks.parts, strict=True)):
            here = down < length
            if len(memory.stores) > 1:
                here &= moves.version[entry] == v

            @pl.when(here)
            def _(v=v, store=store, first=first, length=length):
                inside = edge_mask(down, rows, length), edge_mask(column, columns, hidden)
                mask = tile_mask(*inside, (rows, columns))
                layer = memory.layer[1 + v if memory.layer.shape[0] > 1 else 0]
                at = pl.ds(first + down, rows), pl.ds(column, columns)
                source = store.at[layer, moves.expert[entry], *at]
                target = arena.at[pl.ds(moves.row[entry] + first + down, rows), at[1]]
                plgpu.store(target, plgpu.load(source, mask=mask), mask=mask)

    lax.fori_loop(0, _turns(moves.count[0] * chunks.number, program, programs), copy, None)
