"""fill as one Triton-lowered kernel that reads pinned host memory itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import power_of_two_divisor, triton_call

CHUNK = 16384
"""uint16 that a program copies at a time (32 KiB): 8 loads of 128 bits by each of 256 threads."""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    """Rows of a chunk, in views whose rows have `columns` elements."""
    columns: int
    programs: int
    num_warps: int
    num_stages: int


def configuration(hidden: int) -> Config:
    """Chunks of CHUNK elements, whatever the width D = hidden is, as rows of the largest power of
    two that divides D: a record is contiguous, so the arena and the stores are seen in rows of
    that width and only the last chunk needs a mask.

    At most so many programs take the chunks in turns: enough to keep the link busy (4 for each
    of an H200's multiprocessors, 16 MiB under way), and where nothing is missing the kernel ends
    as fast as a kernel can. One program for each of the 128 × 288 chunks that a plan's list could
    have would cost more than the step's other kernels.
    """
    columns = power_of_two_divisor(hidden, CHUNK)
    return Config(CHUNK // columns, columns, programs=512, num_warps=8, num_stages=1)


def fill(arena, stores, layer, expert, row, version, count):
    hidden = arena.shape[1]
    config = configuration(hidden)
    if arena.size // config.columns >= 2**31:
        raise ValueError(
            f"fill 'pallas' addresses rows of {config.columns} elements, the largest power of two "
            f"that divides {hidden}: an arena of {arena.size} elements has too many for int32; "
            "'xla' takes it"
        )
    view, *stores = (
        array.reshape(*array.shape[:-2], -1, config.columns) for array in (arena, *stores)
    )
    chunks = pl.cdiv(max(store.shape[2] for store in stores), config.rows)
    programs = min(config.programs, expert.shape[0] * chunks)
    filled = triton_call(
        functools.partial(
            _fill,
            config=config,
            chunks=chunks,
            programs=programs,
            rows_per_row=hidden // config.columns,
        ),
        name="fill",
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={5 + len(stores): 0},
    )(
        *(jnp.reshape(value, 1).astype(jnp.int32) for value in (layer, count)),
        expert,
        row,
        version,
        *stores,
        view,
    )
    return filled.reshape(arena.shape)


def _fill(layer, count, expert, row, version, *refs, config, chunks, programs, rows_per_row):
    """Program p copies chunks p, p + programs, … of all entries' chunks, entry after entry.

    Writes: a chunk of an entry is written by one program, the only one that has its number; two
    entries name disjoint cells. Nobody reads the arena.
    """
    *stores, _, arena = refs
    program = pl.program_id(0)

    def copy(turn, _):
        number = turn * programs + program
        entry, first = lax.div(number, chunks), lax.rem(number, chunks) * config.rows
        start = row[entry] * rows_per_row + first
        for v, store in enumerate(stores):
            record = store.shape[2]

            @pl.when((version[entry] == v) & (first < record))
            def _(store=store, record=record):
                mask = None
                if record % config.rows:
                    inside = first + jnp.arange(config.rows) < record
                    mask = jnp.broadcast_to(inside[:, None], (config.rows, config.columns))
                source = store.at[layer[0], expert[entry], pl.ds(first, config.rows), :]
                target = arena.at[pl.ds(start, config.rows), :]
                plgpu.store(target, plgpu.load(source, mask=mask), mask=mask)

    turns = lax.div(count[0] * chunks - program + programs - 1, programs)
    lax.fori_loop(0, turns, copy, None)
