"""move's copy as one Triton-lowered kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.fill.pallas_triton import configuration_for
from pallas_kernels.triton import triton_call


def copy(arena, source, target, version, wanted, record_rows):
    """copy of the reference, in the chunks of fill."""
    hidden = arena.shape[1]
    config = configuration_for(arena, "move")
    view = arena.reshape(-1, config.columns)
    rows_per_row = hidden // config.columns
    records = tuple(rows * rows_per_row for rows in record_rows)
    chunks = pl.cdiv(max(records), config.rows)
    programs = min(config.programs, source.shape[0] * chunks)
    moved = triton_call(
        functools.partial(
            _copy,
            config=config,
            chunks=chunks,
            programs=programs,
            rows_per_row=rows_per_row,
            records=records,
        ),
        name="move",
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={4: 0},
    )(source, target, version, wanted, view)
    return moved.reshape(arena.shape)


def _copy(
    source, target, version, wanted, _, arena, *, config, chunks, programs, rows_per_row, records
):
    """Program p copies chunks p, p + programs, … of all entries' chunks, entry after entry.

    Writes: only one program has the number of a chunk and writes it; two entries' targets are
    disjoint. Reads: no entry's source is another's target, and the program that writes a chunk also
    reads it.
    """
    program = pl.program_id(0)

    def one(turn, _):
        number = turn * programs + program
        entry, first = lax.div(number, chunks), lax.rem(number, chunks) * config.rows
        rows = jnp.int32(records[0])
        for v, record in enumerate(records[1:], 1):
            rows = jnp.where(version[entry] == v, record, rows)

        @pl.when((wanted[entry] > 0) & (first < rows))
        def _():
            inside = first + jnp.arange(config.rows) < rows
            mask = jnp.broadcast_to(inside[:, None], (config.rows, config.columns))
            here, there = (
                arena.at[pl.ds(row[entry] * rows_per_row + first, config.rows), :]
                for row in (source, target)
            )
            plgpu.store(there, plgpu.load(here, mask=mask), mask=mask)

    turns = lax.div(source.shape[0] * chunks - program + programs - 1, programs)
    lax.fori_loop(0, turns, one, None)
