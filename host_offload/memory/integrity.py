"""Checks the invariants of arena, tables and store. It reads the arena record by record: a host
view of the whole arena would prevent its donation, and would have to wait for the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from host_offload.memory.record_source import RecordSource
from host_offload.memory.tables import Residency
from pallas_kernels.records import decode
from pallas_kernels.records.versions import VersionFormats

FAULTS = (
    "an expert's address is not the cell it owns, in the same version",
    "two cells of a layer hold one version of an expert",
    "an ungranted cell has an owner",
    "two granted cells share an arena row",
    "the bytes of a resident expert differ from the store's",
)


def count_faults(
    tables: Residency,
    record_rows: Sequence[int],
    is_intact: Callable[[int, int, int, int], bool],
) -> list[int]:
    """Counts each of FAULTS.

    - `record_rows`: arena rows of a cell, by version number.
    - `is_intact`: whether the arena has the expert's record, given (layer, expert, version, arena
      row).
    """
    experts = np.arange(tables.address.shape[1])
    owns = tables.owner[:, :, None] == experts  # [L, C, E]
    # An expert may own cells of several versions, but only one cell of its current version.
    current = owns & (tables.cell_version[:, :, None] == tables.version[:, None, :])
    right = current & (tables.cell_row[:, :, None] == tables.address[:, None, :])
    unowned = (tables.address >= 0) & (np.sum(right, axis=1) != 1)
    lost = np.any(current, axis=1) & (tables.address < 0)
    same = (tables.owner[:, :, None] == tables.owner[:, None, :]) & (
        tables.cell_version[:, :, None] == tables.cell_version[:, None, :]
    )
    twice = np.tril(same, k=-1) & (tables.owner[:, :, None] >= 0)
    ungranted = (tables.owner >= 0) & (tables.cell_row < 0)
    granted = tables.cell_row >= 0
    first, sizes = tables.cell_row[granted], np.array(record_rows)[tables.cell_version[granted]]
    order = np.argsort(first)
    shared = first[order][1:] < (first + sizes)[order][:-1]
    held = np.nonzero((tables.owner >= 0) & granted)
    what = tables.owner[held], tables.cell_version[held], tables.cell_row[held]
    places = zip(held[0].tolist(), *(each.tolist() for each in what), strict=True)
    wrong = sum(not is_intact(*place) for place in places)
    return [*(int(np.sum(found)) for found in (unowned | lost, twice, ungranted, shared)), wrong]


def describe_faults(counts: Sequence[int]) -> list[str]:
    """Describes the broken invariants, given the count of each; empty if all hold."""
    return [f"{text} ({n}×)" for text, n in zip(FAULTS, counts, strict=True) if n]


@functools.partial(jax.jit, static_argnames="rows")
def copy_rows(arena: jax.Array, row: jax.Array | int, rows: int) -> jax.Array:
    """Copies `rows` arena rows from `row` on, or the last ones of the arena."""
    return lax.dynamic_slice(arena, (row, 0), (rows, arena.shape[1]))


def has_record(
    record: np.ndarray, source: RecordSource, layer: int, expert: int, lies: VersionFormats | None
) -> bool:
    """Whether a cell's record equals the source's record of the expert; True for a layer that the
    source lacks.

    - `record`: uint16[rows, D].
    - `lies`: formats of the version in a cell and in the source; None: the same.
    """
    place = layer if lies is None else int(lies.place(layer))
    if place < 0:
        return True
    if lies is None or not lies.in_transit:
        return source.holds(place, expert, record)
    stored = np.empty((lies.store.rows, lies.store.hidden), np.uint16)
    source.read(place, expert, stored)
    decoded = lax.bitcast_convert_type(decode(jnp.asarray(stored), lies.store), jnp.uint16)
    return np.array_equal(np.asarray(decoded), record)
