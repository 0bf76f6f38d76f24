"""stage as two Triton-lowered kernels: tables and a list of moves, then the copy of fill."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.fill import Fills, pallas_triton
from pallas_kernels.plan.listing import count, places
from pallas_kernels.records.versions import stored_in_part
from pallas_kernels.stage.admission import Cells, Residency, admit
from pallas_kernels.triton import triton_call

UPDATED = ("owner", "last_used", "address", "version")
"""The tables that a transfer changes, in place."""


@dataclasses.dataclass(frozen=True)
class Config:
    num_warps: int
    num_stages: int


def configuration() -> Config:
    """Rows of the tables are short, so few warps make the reductions of an entry cheap."""
    return Config(num_warps=2, num_stages=1)


def stage(arena, tables, stores, layer, entries, *, formats):
    config = configuration()
    updated = [getattr(tables, name) for name in UPDATED]
    listed = jax.ShapeDtypeStruct(entries.layer.shape, jnp.int32)
    partial = stored_in_part(formats)
    layers = [layer, *(formats[number].place(layer) for number in partial)]
    operands = [
        jnp.concatenate([jnp.reshape(value, 1).astype(jnp.int32) for value in layers]),
        *entries,
        *(tables.cell_row, tables.cell_version, tables.clock),
        *updated,
    ]
    *updated, done, expert, row, version, number = triton_call(
        functools.partial(_admit, versions=len(stores), partial=partial),
        name="stage",
        grid=(1,),
        out_shape=(
            *(jax.ShapeDtypeStruct(table.shape, table.dtype) for table in updated),
            *(listed, listed, listed, listed),
            jax.ShapeDtypeStruct((), jnp.int32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={len(operands) - len(updated) + i: i for i in range(len(updated))},
    )(*operands)
    fills = Fills(expert, row, version, number)
    arena = pallas_triton.fill(arena, stores, layer, fills, formats=formats)
    return arena, tables._replace(**dict(zip(UPDATED, updated, strict=True))), done


def _admit(layer, entry_layer, entry_expert, entry_version, entry_cell, *refs, versions, partial):
    """Decides the entries in order, on rows of the tables held as values, then a barrier and
    stores. The tables already describe the state after the copy kernel, which runs next; a reader
    of tables and arena comes after it.

    Writes: one program. Within it every element has one writer: a table's element by index, a
    list's by a permutation. The barrier separates the loads of tables from the writes by other
    threads.
    """
    cell_row, cell_version, clock, *refs = refs
    owner, last_used, address, version, done, *moves, moves_count = refs[len(UPDATED) :]
    held = [layer[1 + i] for i in range(len(partial))]
    layer = layer[0]
    size, cells, experts = done.shape[0], owner.shape[1], address.shape[1]
    index, cell, expert = (jnp.arange(pl.next_power_of_2(n)) for n in (size, cells, experts))

    def row_of(table, columns, width, other):
        return plgpu.load(table.at[layer, columns], mask=columns < width, other=other)

    def field(entry):
        return plgpu.load(entry.at[index], mask=index < size, other=-1)

    owners = row_of(owner, cell, cells, -1)
    used = row_of(last_used, cell, cells, 0)
    rows = row_of(cell_row, cell, cells, -1)
    now = clock[layer]
    given = Cells(rows, row_of(cell_version, cell, cells, -1), (owners >= 0) & (used == now))
    # The experts that pad the row have no entry: `known` below.
    before = Residency(
        owners,
        jnp.zeros_like(owners),
        row_of(address, expert, experts, -1),
        row_of(version, expert, experts, -1),
    )
    ours = (field(entry_layer) == layer) & (index < size)

    def carry_out(i, carry):
        before, done = carry
        e, v = entry_expert[i], entry_version[i]
        known = (e < experts) & (v >= 0) & (v < versions)
        for number, place in zip(partial, held, strict=True):
            known &= (v != number) | (place >= 0)
        due = (entry_layer[i] == layer) & known
        after, admitted = admit(given, before, due, e, v, entry_cell[i])
        return after, jnp.where((index == i) & admitted, 1, done)

    start = before, jnp.zeros_like(index)
    # Most lists have nothing for most layers.
    after, carried_out = lax.cond(
        count(ours) > 0, lambda: lax.fori_loop(0, size, carry_out, start), lambda: start
    )
    carried_out = carried_out > 0

    entry_cells = field(entry_cell)
    target = plgpu.load(
        cell_row.at[layer, jnp.where(carried_out, entry_cells, 0)], mask=carried_out, other=-1
    )
    place = places(carried_out)
    values = field(entry_expert), target, field(entry_version)

    plgpu.debug_barrier()

    def put(table, columns, value, mask):
        plgpu.store(table.at[layer, columns], value, mask=mask)

    put(owner, cell, after.owner, cell < cells)
    put(last_used, cell, jnp.full_like(cell, now - 1), after.staged > 0)
    put(address, expert, after.address, expert < experts)
    put(version, expert, after.version, expert < experts)
    plgpu.store(done.at[index], carried_out.astype(jnp.int32), mask=index < size)
    for move, value in zip(moves, values, strict=True):
        plgpu.store(move.at[place], value, mask=index < size)
    moves_count[...] = count(carried_out)
