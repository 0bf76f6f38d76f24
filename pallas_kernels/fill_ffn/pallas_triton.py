"""fill_ffn as Triton kernels that copy records and compute experts beside each other.

    1. copies gate and up of the missing experts, beside gate_up of all others;
    2. copies down of the missing experts, beside gate_up of those;
    3. expert_down of all.

The link is busy throughout 1 and 2, and only one product comes after it. Records that are not
dense, and those with biases, which lie behind down, are copied whole in 1. The programs that copy
come first in each grid. Copying and computing programs need no synchronisation: each launch
computes what the one before has copied. Tiles, and so the bits, are those of expert_ffn.
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

from pallas_kernels import plgpu
from pallas_kernels.expert_ffn import ExpertBatch, few_tokens
from pallas_kernels.expert_ffn.pallas_triton import configuration_of, in_kernels, memory_of
from pallas_kernels.expert_ffn.tile import Memory, Tile
from pallas_kernels.fill import Fills
from pallas_kernels.fill_ffn.versions import why_not_pallas
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import Formats
from pallas_kernels.triton import edge_mask, scalar, tile_mask, triton_call

CHUNK = 4096
"""Elements that a program copies at a time (8 KiB): 4 loads of 128 bits by each of 128 threads.
With 8 or with 2, ptxas spills registers of the products of 64 rows (H200)."""

COPIES = {99: 16, 163: 16, 227: 32}
"""Class of GPU → most programs that copy. A link of 48 GB/s and 2 µs has 96 KB in flight, and 32
programs have 2.6 times as much. With them a step on an H200 takes the time of its bytes
(docs/research/benchmarks.md); 16 programs are not measured. Each takes the place of a program that
computes, of which a multiprocessor has one or two."""

LATE = 32
"""Programs that compute the missing experts, in turns, beside the second part of the copies, which
takes longer. If nothing is missing they end at once."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a kernel's code, beside shapes."""

    gate_up: Tile
    down: Tile
    copies: int
    late: int


def configuration(x: jax.Array, formats: Formats, row_tile: int, shared_kib: int) -> Config:
    """The tiles of expert_ffn. Raises ValueError for what the kernels do not take."""
    config = configuration_of(x, formats, row_tile, shared_kib)
    if config.rows != few_tokens.ROWS:
        raise ValueError(
            f"fill_ffn 'pallas' has products of {few_tokens.ROWS} rows, not {row_tile}; use 'xla'"
        )
    why = why_not_pallas((cell.version, held.version) for cell, held, _ in formats)
    if why is not None:
        raise ValueError(f"fill_ffn 'pallas': {why}; 'xla' takes it")
    return Config(config.gate_up, config.down, COPIES[shared_kib], LATE)


class Shares(NamedTuple):
    """How the programs of a block of tokens share the work of a launch."""

    chunks: _Chunks
    copies: int
    """Programs that copy; they come first."""
    tiles: int
    """Tiles of columns of h; each other program has one at a time."""


def fill_ffn(y, arena, batch, places, fills, options, epilogue):
    formats, dtype = options.formats, batch.x.dtype
    config = configuration(batch.x, formats, options.row_tile, options.shared_kib)
    memory = memory_of(arena, places, formats, dtype)
    fills = fills._replace(count=scalar(fills.count))
    batch = batch._replace(active_count=scalar(batch.active_count))
    given = {"config": config, "formats": formats, "activation": in_kernels(options.activation)}
    memory, h = _launch(memory, None, batch, fills, **given, late=False)
    memory, h = _launch(memory, h, batch, fills, **given, late=True)
    y = few_tokens.expert_down(y, h, memory, batch, epilogue, formats=formats, down=config.down)
    view = memory.coded if memory.dense is None else memory.dense
    return lax.bitcast_convert_type(view, arena.dtype), y


def _launch(memory, h, batch, fills, *, config, formats, activation, late):
    """One launch: (memory with the arena after the copies, h). late: whether it is the second."""
    sizes, width = few_tokens.Sizes.of(batch), formats[0].cell.width
    tiles = pl.cdiv(width, config.gate_up.columns)
    parts = [_part(cell, late) for cell, _, _ in formats]
    chunks = _Chunks.of(parts, batch.x.shape[1])
    # The first of each block of tokens.
    copies = pl.cdiv(min(config.copies, fills.expert.shape[0] * chunks.number), sizes.blocks)
    items = tiles * sizes.slots
    view = memory.coded if memory.dense is None else memory.dense
    changed = (view, h) if late else (view,)
    operands = memory._replace(dense=None, coded=None), batch, fills
    place = len(jax.tree.leaves(operands))
    view, h = triton_call(
        functools.partial(
            _late if late else _early,
            shares=Shares(chunks, copies, tiles),
            gate_up=functools.partial(
                few_tokens.gate_up_of, tile=config.gate_up, formats=formats, activation=activation
            ),
        ),
        name="expert_gate_up_filled" if late else "expert_gate_up_hits",
        grid=(sizes.blocks, copies + (min(config.late, items) if late else items)),
        out_shape=(
            jax.ShapeDtypeStruct(view.shape, view.dtype),
            jax.ShapeDtypeStruct((sizes.rows, width), batch.x.dtype),
        ),
        num_warps=config.gate_up.num_warps,
        num_stages=config.gate_up.num_stages,
        aliases={place + i: i for i in range(len(changed))},
    )(*operands, changed)
    return memory._replace(**{"coded" if memory.dense is None else "dense": view}), h


def _part(fmt: RecordFormat, late: bool) -> tuple[int, int]:
    """The first row and the rows of a record that one of the launches copies."""
    apart = fmt.version == "dense" and not fmt.biases
    first = fmt.parts["down"][0] if apart else fmt.rows
    return (first, fmt.rows - first) if late else (0, first)


class _Chunks(NamedTuple):
    """How the parts of records are cut: rows × columns elements, the last chunk masked."""

    parts: tuple[tuple[int, int], ...]
    """Per version, (first row in a record, rows)."""
    rows: int
    columns: int
    across: int
    """Chunks side by side."""
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
    batch: ExpertBatch,
    fills: Fills,
    _,
    arena: Any,
    h: Any,
    *,
    shares: Shares,
    gate_up: Callable[..., None],
) -> None:
    """The first launch. Programs below `copies` copy the first parts of records. Each other program
    computes one tile of h for one place in `active` whose expert is not filled.

    Writes: one program writes a chunk of a filled cell, and one program a tile of h. Reads: cells
    of active experts that are not filled, and the stores. A plan fills no cell of an active expert,
    so no program reads what another one writes.
    """
    block, program = pl.program_id(0), pl.program_id(1)
    _copy((block, program), shares, batch, memory, fills, arena)

    @pl.when(program >= shares.copies)
    def _computes():
        place = _place(block, program - shares.copies, shares.tiles)

        @pl.when(place.slot < batch.active_count[0])
        def _active():
            expert = batch.active[place.slot]

            @pl.when(~_is_filled(expert, fills))
            def _hit():
                gate_up(place, expert, _with_arena(memory, arena), batch, h)


def _late(
    memory: Memory,
    batch: ExpertBatch,
    fills: Fills,
    _,
    arena: Any,
    h: Any,
    *,
    shares: Shares,
    gate_up: Callable[..., None],
) -> None:
    """The second launch. Programs below `copies` copy the rest of the records. The others take the
    tiles of h of the filled experts in turns.

    Writes: one program writes a chunk of down of a filled cell, and one program a tile of h. Reads:
    gate and up of these cells, which the launch before has copied. Nothing is left of records that
    it copied whole.
    """
    block, program = pl.program_id(0), pl.program_id(1)
    _copy((block, program), shares, batch, memory, fills, arena)

    @pl.when(program >= shares.copies)
    def _computes():
        first, programs = program - shares.copies, pl.num_programs(1) - shares.copies

        def turn(n, _):
            place = _place(block, n * programs + first, shares.tiles)
            expert = fills.expert[place.slot]
            place = place._replace(slot=_slot(expert, batch.active, batch.active_count))
            gate_up(place, expert, _with_arena(memory, arena), batch, h)

        lax.fori_loop(0, _turns(fills.count[0] * shares.tiles, first, programs), turn, None)


def _place(block: jax.Array, number: jax.Array, tiles: int) -> few_tokens.Place:
    """The place of a program: tiles first, then experts."""
    return few_tokens.Place(block, lax.rem(number, tiles), lax.div(number, tiles))


def _with_arena(memory: Memory, arena: Any) -> Memory:
    coded = arena.dtype == jnp.uint16
    return memory._replace(coded=arena) if coded else memory._replace(dense=arena)


def _turns(items: jax.Array, first: jax.Array, programs: int | jax.Array) -> jax.Array:
    """The number of items first, first + programs, …"""
    return lax.div(items - first + programs - 1, programs)


def _is_filled(expert: jax.Array, fills: Fills) -> jax.Array:
    """bool: whether the expert is among the fills."""
    listed: Any = fills.expert
    entry = jnp.arange(pl.next_power_of_2(listed.shape[0]))
    others = plgpu.load(listed.at[entry], mask=entry < fills.count[0], other=-1)
    return jnp.max((others == expert).astype(jnp.int32)) > 0


def _slot(expert: jax.Array, active: Any, count: Any) -> jax.Array:
    """The expert's place in `active`, which is ascending."""
    place = jnp.arange(pl.next_power_of_2(active.shape[0]))
    inside = place < jnp.minimum(count[0], active.shape[0])
    others = plgpu.load(active.at[place], mask=inside, other=jnp.iinfo(jnp.int32).max)
    return jnp.sum((others < expert).astype(jnp.int32))


def _copy(
    at: tuple[jax.Array, jax.Array],
    shares: Shares,
    batch: ExpertBatch,
    memory: Memory,
    fills: Fills,
    arena: Any,
) -> None:
    """The work of programs below `copies` of each block. at: the program's (block, number)."""
    if not shares.copies:
        return
    (block, program), blocks = at, few_tokens.Sizes.of(batch).blocks

    @pl.when(program < shares.copies)
    def _copies():
        number = program * blocks + block
        _copy_chunks(number, shares.copies * blocks, memory, fills, arena, shares.chunks)


def _copy_chunks(
    program: jax.Array, programs: int, memory: Memory, fills: Fills, arena: Any, chunks: _Chunks
) -> None:
    """Copies chunks program, program + programs, … of all entries' chunks, entry after entry."""
    rows, columns, hidden = chunks.rows, chunks.columns, arena.shape[1]

    def copy(turn, _):
        number = turn * programs + program
        entry, chunk = lax.div(number, chunks.number), lax.rem(number, chunks.number)
        down = lax.div(chunk, chunks.across) * rows
        column = lax.rem(chunk, chunks.across) * columns
        for v, (store, (first, length)) in enumerate(zip(memory.stores, chunks.parts, strict=True)):
            here = down < length
            if len(memory.stores) > 1:
                here &= fills.version[entry] == v

            @pl.when(here)
            def _(v=v, store=store, first=first, length=length):
                inside = edge_mask(down, rows, length), edge_mask(column, columns, hidden)
                mask = tile_mask(*inside, (rows, columns))
                layer = memory.layer[1 + v if memory.layer.shape[0] > 1 else 0]
                at = pl.ds(first + down, rows), pl.ds(column, columns)
                source = store.at[layer, fills.expert[entry], *at]
                target = arena.at[pl.ds(fills.row[entry] + first + down, rows), at[1]]
                plgpu.store(target, plgpu.load(source, mask=mask), mask=mask)

    lax.fori_loop(0, _turns(fills.count[0] * chunks.number, program, programs), copy, None)
