"""fill as one Triton-lowered kernel that reads pinned host memory itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.records.format import MATRICES, RecordFormat
from pallas_kernels.records.tile import DOWN, ExactPlane, read_exact_planes, span
from pallas_kernels.triton import power_of_two_divisor, triton_call

CHUNK = 16384
"""uint16 elements that a program copies at a time (32 KiB): 8 loads of 128 bits in 256 threads."""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    """Rows of a chunk, in views whose rows have `columns` elements."""
    columns: int
    programs: int
    num_warps: int
    num_stages: int


DECODED = 2048
"""Codes that a program decodes at a time into four times as many weights: 128 bits of codes and
256 of bytes for each of 256 threads."""


def configuration(hidden: int) -> Config:
    """Chunks of CHUNK elements for any width D = hidden.

    A record is contiguous, so arena and stores are viewed in rows of the largest power of two that
    divides D, and only the last chunk needs a mask. The programs take chunks in turns. There are
    enough of them to keep the link busy (4 for each multiprocessor of an H200, 16 MiB in flight),
    and few enough to end at once if nothing is missing. A program for each of the 128 × 288 chunks
    that a plan's list may have would cost more than the other kernels of a step.
    """
    columns = power_of_two_divisor(hidden, CHUNK)
    return Config(CHUNK // columns, columns, programs=512, num_warps=8, num_stages=1)


def configuration_for(arena: jax.Array, op: str) -> Config:
    """The configuration for an arena.

    - `op`: its name in the message.

    Raises ValueError for an arena with too many rows of that width.
    """
    hidden = arena.shape[1]
    config = configuration(hidden)
    if arena.size // config.columns >= 2**31:
        raise ValueError(
            f"{op} 'pallas' addresses rows of {config.columns} elements, the largest power of two "
            f"that divides {hidden}: an arena of {arena.size} elements has too many for int32; "
            "'xla' takes it"
        )
    return config


def fill(arena, stores, layer, fills, *, formats):
    hidden = arena.shape[1]
    config = configuration_for(arena, "fill")
    encoded = [None] * len(stores)
    if formats is not None:
        encoded = [f.store if f.in_transit else None for f in formats]
    view, *views = (
        # Decoding reads a record by its own rows.
        array if fmt else array.reshape(*array.shape[:-2], -1, config.columns)
        for array, fmt in zip((arena, *stores), (None, *encoded), strict=True)
    )
    chunks = max(
        sum(_decoded_chunks(fmt)) if fmt else pl.cdiv(store.shape[2], config.rows)
        for store, fmt in zip(views, encoded, strict=True)
    )
    programs = min(config.programs, fills.expert.shape[0] * chunks)
    places = [layer]
    if formats is not None and any(f.places is not None for f in formats):
        places = [f.place(layer) for f in formats]
    filled = triton_call(
        functools.partial(
            _fill,
            config=config,
            chunks=chunks,
            programs=programs,
            rows_per_row=hidden // config.columns,
            encoded=encoded,
        ),
        name="fill",
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={5 + len(stores): 0},
    )(
        jnp.concatenate([jnp.reshape(place, 1).astype(jnp.int32) for place in places]),
        jnp.reshape(fills.count, 1).astype(jnp.int32),
        fills[:3],
        *views,
        view,
    )
    return filled.reshape(arena.shape)


def _fill(layer, count, moves, *refs, config, chunks, programs, rows_per_row, encoded):
    """Program p copies chunks p, p + programs, … of all entries' chunks, entry after entry.

    Writes: only one program has the number of a chunk and writes it; two entries name disjoint
    cells. No program reads the arena.
    """
    (expert, row, version), (*stores, _, arena) = moves, refs
    program = pl.program_id(0)

    def copy(turn, _):
        number = turn * programs + program
        entry, chunk = lax.div(number, chunks), lax.rem(number, chunks)
        first = chunk * config.rows
        start = row[entry] * rows_per_row + first
        for v, (store, fmt) in enumerate(zip(stores, encoded, strict=True)):
            place = v if layer.shape[0] > 1 else 0
            if fmt is not None:

                @pl.when(version[entry] == v)
                def _(store=store, fmt=fmt, place=place):
                    record = functools.partial(_elements, store, layer[place], expert[entry])
                    _decode(record, fmt, arena, row[entry] * rows_per_row, rows_per_row, chunk)

                continue
            record = store.shape[2]

            @pl.when((version[entry] == v) & (first < record))
            def _(store=store, record=record, place=place):
                mask = None
                if record % config.rows:
                    inside = first + jnp.arange(config.rows) < record
                    mask = jnp.broadcast_to(inside[:, None], (config.rows, config.columns))
                source = store.at[layer[place], expert[entry], pl.ds(first, config.rows), :]
                target = arena.at[pl.ds(start, config.rows), :]
                plgpu.store(target, plgpu.load(source, mask=mask), mask=mask)

    turns = lax.div(count[0] * chunks - program + programs - 1, programs)
    lax.fori_loop(0, turns, copy, None)


def _decode_tile(fmt: RecordFormat) -> tuple[int, int]:
    """Rows and columns of codes that are decoded at a time. The columns divide a row of codes, so
    the weights of each plane are consecutive."""
    columns = power_of_two_divisor(fmt.hidden // fmt.planes, 512)
    return DECODED // columns, columns


def _decoded_chunks(fmt: RecordFormat) -> list[int]:
    """Tiles of codes of a record's matrices, then those of its biases, if it has any."""
    rows, columns = _decode_tile(fmt)
    across = pl.cdiv(fmt.width, rows) * (fmt.hidden // fmt.planes // columns)
    down = pl.cdiv(pl.cdiv(fmt.width, fmt.planes), rows) * (fmt.hidden // columns)
    biases = pl.cdiv(_bias_rows(fmt), rows) * (fmt.hidden // columns)
    return [*[across] * (len(fmt.matrices) - 1), down, *([biases] if fmt.biases else [])]


def _bias_rows(fmt: RecordFormat) -> int:
    return sum(map(fmt.bias_rows, fmt.matrices))


def _elements(store, layer, expert, row, column, mask):
    at = store.at[layer, expert, row, column]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def _decode(read, fmt, arena, start, rows_per_row, chunk):
    """Decodes one tile of codes of a record into the dense record that begins at arena row
    `start`. The tiles write disjoint weights."""
    rows, columns = _decode_tile(fmt)
    for number, tiles in enumerate(_decoded_chunks(fmt)):
        biases = number == len(fmt.matrices)
        matrix = None if biases else MATRICES.index(fmt.matrices[number])
        width = fmt.hidden if matrix in (None, DOWN) else fmt.hidden // fmt.planes
        tile = chunk - sum(_decoded_chunks(fmt)[:number])

        @pl.when((tile >= 0) & (tile < tiles))
        def _(number=number, matrix=matrix, width=width, tile=tile):
            row = lax.div(tile, width // columns) * rows
            column = lax.rem(tile, width // columns) * columns
            shape = rows, columns
            if matrix is None:
                planes = [_biases(read, fmt, row, column, shape)]
            else:
                planes = read_exact_planes(read, fmt, matrix, row, column, shape)
            for plane in planes:
                weight_row = number * fmt.width + plane.row
                at, first = start + weight_row * rows_per_row, plane.column
                if rows_per_row > 1:  # else Triton would not see that `first` is a multiple
                    at, first = at + lax.div(first, arena.shape[1]), lax.rem(first, arena.shape[1])
                target = arena.at[at, span(first, columns)[None, :]]
                plgpu.store(target, plane.bits, mask=plane.mask)


def _biases(read, fmt, row, column, shape) -> ExactPlane:
    """A tile of the rows of biases, which are the last of both records."""
    rows, (first, _) = span(row, shape[0])[:, None], fmt.parts[f"{fmt.matrices[0]}_bias"]
    mask = None
    if _bias_rows(fmt) % shape[0]:
        mask = jnp.broadcast_to(rows < _bias_rows(fmt), shape)
    return ExactPlane(rows, column, read(first + rows, span(column, shape[1])[None, :], mask), mask)
