"""The invariants of arena, tables and store, checked inside jit: a live host view of the arena
would defeat its donation, and would have to wait for the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from host_offload.memory.record_source import RecordSource
from pallas_kernels.cpu.arena import OwnedArena, read_rows
from pallas_kernels.plan import Tables
from pallas_kernels.records import decode
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.versions import Formats

FAULTS = (
    "an expert's address is not the cell it owns, in the same version",
    "two cells of a layer hold one version of an expert",
    "an ungranted cell has an owner",
    "two granted cells share an arena row",
    "the bytes of a resident expert differ from the store's",
)


def count_faults(
    arena: jax.Array | OwnedArena,
    tables: Tables,
    stores: tuple[jax.Array, ...],
    formats: Formats | None = None,
) -> jax.Array:
    """int32[len(FAULTS)]: how often each invariant is broken. Jit-able, changes nothing.

    arena uint16[rows, D]; stores: per version uint16[L, E, record rows, D]; formats: how each
    version lies in a cell and in its store, None: alike in both. The bytes of records that are not
    given, in files or in separate arrays, are not compared here: see count_damaged.
    """
    layers, cells = tables.owner.shape
    experts = jnp.arange(tables.address.shape[1])
    owns = tables.owner[:, :, None] == experts  # [L, C, E]
    right = (
        owns
        & (tables.cell_row[:, :, None] == tables.address[:, None, :])
        & (tables.cell_version[:, :, None] == tables.version[:, None, :])
    )
    unowned = (tables.address >= 0) & (jnp.sum(right, axis=1) != 1)
    # An expert may also own a cell of another version, but its current version is one place.
    current = owns & (tables.cell_version[:, :, None] == tables.version[:, None, :])
    lost = jnp.any(current, axis=1) & (tables.address < 0)
    same = (tables.owner[:, :, None] == tables.owner[:, None, :]) & (
        tables.cell_version[:, :, None] == tables.cell_version[:, None, :]
    )
    earlier = jnp.tri(cells, k=-1, dtype=bool)
    twice = same & earlier & (tables.owner[:, :, None] >= 0)
    ungranted = (tables.owner >= 0) & (tables.cell_row < 0)
    record_rows = [
        store.shape[2] if formats is None else formats[v].cell.rows
        for v, store in enumerate(stores)
    ]
    rows = tables.cell_row.reshape(-1)
    ends = rows + jnp.array(record_rows)[tables.cell_version.reshape(-1)]
    both = (rows[:, None] >= 0) & (rows >= 0) & jnp.tri(rows.size, k=-1, dtype=bool)
    shared = both & (rows[:, None] < ends) & (rows < ends[:, None])

    def compare(i, wrong):
        layer, cell = i // cells, i % cells
        owner, row = tables.owner[layer, cell], tables.cell_row[layer, cell]
        for v, store in enumerate(stores):
            if isinstance(store, AbsentRecords):
                continue
            live = (owner >= 0) & (row >= 0) & (tables.cell_version[layer, cell] == v)
            place = layer if formats is None else formats[v].place(layer)
            live = live & (place >= 0)
            start = (jnp.maximum(place, 0), jnp.maximum(owner, 0), 0, 0)
            want = lax.dynamic_slice(store, start, (1, 1, *store.shape[2:]))[0, 0]
            want = jax.device_put(want, jax.memory.Space.Device)
            if formats is not None and formats[v].in_transit:
                decoded = decode(want, formats[v].store)
                want = lax.bitcast_convert_type(decoded, jnp.uint16)
            have = _rows(arena, jnp.maximum(row, 0), want.shape)
            wrong = wrong + (live & jnp.any(want != have))
        return wrong

    wrong = lax.fori_loop(0, layers * cells, compare, jnp.int32(0))
    counts = [jnp.sum(f, dtype=jnp.int32) for f in (unowned | lost, twice, ungranted, shared)]
    return jnp.stack([*counts, wrong])


def count_damaged(arena: np.ndarray, tables: Tables, version: int, source: RecordSource) -> int:
    """How many residents of one version have other bytes than its source says.

    arena: uint16[rows, D], that nobody writes. tables: on the host.
    """
    owner, row = tables.owner, tables.cell_row
    held = (owner >= 0) & (row >= 0) & (tables.cell_version == version)
    wrong = 0
    for layer, cell in np.argwhere(held):
        first = row[layer, cell]
        record = arena[first : first + source.format.rows]
        wrong += not source.holds(layer, int(owner[layer, cell]), record)
    return wrong


def _rows(arena: jax.Array | OwnedArena, row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint16 of that shape from an arena row on, or the last ones that there are."""
    if isinstance(arena, OwnedArena):
        first = jnp.minimum(row, arena.rows - shape[0]).reshape(1)
        return read_rows(arena, first, shape[0], width=shape[1])[0].reshape(shape)
    return lax.dynamic_slice(arena, (row, 0), shape)


def describe_faults(counts: np.ndarray) -> list[str]:
    """The broken invariants in words; empty when all hold."""
    return [f"{text} ({n}×)" for text, n in zip(FAULTS, counts, strict=True) if n]
