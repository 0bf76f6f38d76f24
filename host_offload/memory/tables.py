"""The device's tables: the place of each expert, the owner of each cell, the weights of
eviction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from pallas_kernels.plan import Tables

LRU_WEIGHTS = (1, 0, 0)
"""Weights of pallas_kernels.plan.victim_key that evict the least recently used expert."""


class Residency(NamedTuple):
    """A copy of the device's tables, int32: the fields of pallas_kernels.plan.Tables."""

    cell_row: np.ndarray
    """[L, C]"""
    cell_version: np.ndarray
    owner: np.ndarray
    last_used: np.ndarray
    address: np.ndarray
    """[L, E]"""
    version: np.ndarray
    frequency: np.ndarray
    fill_version: np.ndarray
    prior: np.ndarray
    clock: np.ndarray
    """[L]"""
    victim_weights: np.ndarray
    """[3]"""

    def copy(self) -> Residency:
        return Residency(*(table.copy() for table in self))


class Entry(NamedTuple):
    """One transfer of a step's stage list."""

    layer: int
    expert: int
    version: int
    cell: int


class Move(NamedTuple):
    """A cell that moves within the arena, with its contents."""

    layer: int
    cell: int
    row: int
    """The cell's new arena row."""


class Copy(NamedTuple):
    """A record for the queue to copy into a cell that no entry points to yet."""

    layer: int
    expert: int
    version: int
    row: int
    """The cell's arena row."""


class HandOver(NamedTuple):
    """A cell that passes from one layer to another; if both are the same, the cell is emptied."""

    giver: int
    cell: int
    """The cell's number in the giver."""
    expert: int
    """The cell's owner, −1 without one. If another expert owns it by now, the cell stays."""
    taker: int
    place: int
    """The cell's number in the taker, which no other granted cell may have."""


class HandOvers(NamedTuple):
    """A list of HandOver as programs take it, int32[S] a field; giver −1: unused entry."""

    giver: jax.Array
    cell: jax.Array
    expert: jax.Array
    taker: jax.Array
    place: jax.Array


def cold_tables(
    cells: np.ndarray,
    experts: int,
    victim_weights: Sequence[int] = LRU_WEIGHTS,
    bound: int | None = None,
    fill_version: np.ndarray | int = 0,
) -> Residency:
    """Returns tables of a start: the first cells of each layer are granted, nothing is resident.

    - `cells`: int[L], granted cells of each layer; or int[L, V], of each version, one version after
      the other.
    - `bound`: C, most cells of a layer (default: the number of experts).
    - `fill_version`: version that misses fill, of all experts or int[L, E].
    """
    layers, columns = len(cells), experts if bound is None else bound
    ends = np.cumsum(np.asarray(cells).reshape(layers, -1), axis=1)

    def full(width: int, value: int) -> np.ndarray:
        return np.full((layers, width), value, np.int32)

    row = np.arange(layers * columns, dtype=np.int32).reshape(layers, columns)
    column = np.arange(columns)
    granted = column < ends[:, -1:]
    version = np.sum(column >= ends[:, :-1, None], axis=1, dtype=np.int32)
    return Residency(
        cell_row=np.where(granted, row, np.int32(-1)),
        cell_version=np.where(granted, version, np.int32(0)),
        owner=full(columns, -1),
        last_used=full(columns, 0),
        address=full(experts, -1),
        version=full(experts, 0),
        frequency=full(experts, 0),
        fill_version=full(experts, 0) + np.asarray(fill_version, np.int32),
        prior=full(experts, 0),
        clock=np.zeros(layers, np.int32),
        victim_weights=np.array(victim_weights, np.int32),
    )


def empty_tables(
    layers: int, experts: int, cells: int, victim_weights: Sequence[int] = LRU_WEIGHTS
) -> Tables:
    """Returns tables of a start without granted cells, on the device.

    - `cells`: C, most cells of a layer.
    """
    tables = cold_tables(np.zeros(layers, np.int32), experts, victim_weights, cells)
    return Tables(*map(jnp.array, tables))


def regrant(tables: Tables, cell_row: jax.Array) -> Tables:
    """Grants other cells, between two steps. Returns the tables.

    An expert whose cell moved or was taken away becomes absent; all others stay resident. Jit-able.
    Only tables change, so budgets change without recompilation.

    - `cell_row`: int32[L, C], arena rows; −1: not granted.
    """
    lost = (tables.owner >= 0) & (tables.cell_row != cell_row)
    after = without(tables, lost)
    return after._replace(cell_row=cell_row, owner=jnp.where(cell_row < 0, -1, after.owner))


def without(tables: Tables, lost: jax.Array) -> Tables:
    """Empties some cells, bool[L, C], whose owners become absent. Returns the tables. Jit-able."""
    experts = jnp.arange(tables.address.shape[1])
    owns = (tables.owner[:, :, None] == experts) & (
        tables.cell_row[:, :, None] == tables.address[:, None, :]
    )
    dropped = jnp.any(owns & lost[:, :, None], axis=1)
    return tables._replace(
        owner=jnp.where(lost, -1, tables.owner),
        address=jnp.where(dropped, -1, tables.address),
    )


def hand_over(
    tables: Tables, giver: jax.Array | int, taker: jax.Array | int, cells: jax.Array
) -> Tables:
    """Passes cells from layer `giver` to layer `taker`, between two layers of a step. Cells keep
    their rows, versions and numbers. Returns the tables.

    So a cell of a pool has the same number in all layers, and belongs to the layer that has it
    granted. The pool may be the window of two layers, or the cache of all layers.

    The cells are empty afterwards, and experts that were in them are absent. None of the numbers
    may be granted in the taker, unless it is the giver. The arena is not touched, so the next fill
    of such a cell must come after its last reader. Jit-able.

    - `cells`: bool[C]; those that are granted are passed on.
    """

    def at(table: jax.Array, layer: jax.Array | int) -> jax.Array:
        return lax.dynamic_index_in_dim(table, layer, keepdims=False)

    def put(table: jax.Array, layer: jax.Array | int, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(table, row, layer, 0)

    row, owner, version, address = (
        at(table, giver)
        for table in (tables.cell_row, tables.owner, tables.cell_version, tables.address)
    )
    goes = cells & (row >= 0)
    held = (owner[:, None] == jnp.arange(address.shape[0])) & (row[:, None] == address)
    gone = jnp.any(held & goes[:, None], axis=0)
    cell_row = put(tables.cell_row, giver, jnp.where(goes, -1, row))
    owners = put(tables.owner, giver, jnp.where(goes, -1, owner))
    return tables._replace(
        cell_row=put(cell_row, taker, jnp.where(goes, row, at(cell_row, taker))),
        owner=put(owners, taker, jnp.where(goes, -1, at(owners, taker))),
        cell_version=put(
            tables.cell_version, taker, jnp.where(goes, version, at(tables.cell_version, taker))
        ),
        address=put(tables.address, giver, jnp.where(gone, -1, address)),
    )


def hand_over_cells(tables: Tables, moves: HandOvers) -> Tables:
    """Passes a list of cells to other layers, with their rows and versions. Returns the tables.

    Unlike `hand_over` it passes single cells, under any numbers, one after the other. The cells are
    empty afterwards, and experts that were in them are absent. Entries that do not fit the tables
    are skipped. The arena is not touched, so the next fill of such a cell must come after its last
    reader. Jit-able.
    """
    listed = jnp.stack([jnp.asarray(field) for field in moves], axis=1)

    def carry_out(i: jax.Array, tables: Tables) -> Tables:
        giver, cell, expert, taker, at = listed[i]
        row = tables.cell_row[giver, cell]
        same = (giver == taker) & (cell == at)
        fits = (giver >= 0) & (row >= 0) & (tables.owner[giver, cell] == expert)
        fits &= same | (tables.cell_row[taker, at] < 0)
        held = fits & (expert >= 0) & (tables.address[giver, expert] == row)

        def put(table: jax.Array, layer: jax.Array, column: jax.Array, value: jax.Array | int):
            return table.at[layer, column].set(jnp.where(fits, value, table[layer, column]))

        address = tables.address[giver, expert]
        return tables._replace(
            cell_row=put(put(tables.cell_row, giver, cell, -1), taker, at, row),
            owner=put(put(tables.owner, giver, cell, -1), taker, at, -1),
            cell_version=put(tables.cell_version, taker, at, tables.cell_version[giver, cell]),
            address=tables.address.at[giver, expert].set(jnp.where(held, -1, address)),
        )

    # Lists are long but mostly have few entries, so the loop ends with the last used one.
    used = jnp.where(listed[:, 0] >= 0, jnp.arange(1, len(listed) + 1), 0)
    return lax.fori_loop(0, jnp.max(used, initial=0), carry_out, tables)


def seat_absent(
    tables: Tables, layer: jax.Array | int, first: int
) -> tuple[Tables, jax.Array, jax.Array, jax.Array]:
    """Gives the absent experts of a layer, in the order of their ids, the granted cells from column
    `first` on. The granted ones of these cells must be empty and come first. Jit-able.

    Returns (tables, expert int32[C − first], arena row of each one's cell, how many): the cells
    that must be filled.
    """
    row = lax.dynamic_index_in_dim(tables.cell_row, layer, keepdims=False)[first:]
    address = lax.dynamic_index_in_dim(tables.address, layer, keepdims=False)
    experts, cells = address.shape[0], row.shape[0]
    absent = address < 0
    count = jnp.minimum(jnp.sum(row >= 0), jnp.sum(absent)).astype(jnp.int32)
    rank = jnp.cumsum(absent) - 1
    seated = absent & (rank < count)
    # Sorted, the n-th absent expert has the n-th smallest id.
    listed = jnp.sort(jnp.where(absent, jnp.arange(experts), experts))
    expert = jnp.pad(listed, (0, max(cells - experts, 0)))[:cells].astype(jnp.int32)
    owner = jnp.where(jnp.arange(cells) < count, expert, -1)
    placed = jnp.where(seated, row[jnp.clip(rank, 0, cells - 1)], address)
    after = tables._replace(
        owner=lax.dynamic_update_slice(tables.owner, owner[None], (layer, first)),
        address=lax.dynamic_update_index_in_dim(tables.address, placed, layer, 0),
    )
    return after, expert, row, count


def with_contents(tables: Tables, contents: Mapping[str, ArrayLike]) -> Tables:
    """Returns the tables with other contents of some fields, int32 arrays of the same shapes."""
    # A copy, because the next step donates the array.
    arrays = {name: np.array(values, np.int32) for name, values in contents.items()}
    return tables._replace(**jax.device_put(arrays, tables.clock.sharding))


def snapshot(tables: Tables) -> jax.Array:
    """Copies all tables to one array int32[n], for one transfer to the host. The tables may be
    donated afterwards. Jit-able."""
    return jnp.concatenate([table.reshape(-1) for table in tables])


def read_snapshot(packed: np.ndarray, tables: Tables) -> Residency:
    """Returns the tables of a snapshot.

    - `packed`: int32[n], the snapshot on the host.
    - `tables`: any tables of the same shapes.
    """
    parts, first = [], 0
    for shape in (table.shape for table in tables):
        parts.append(packed[first : first + math.prod(shape)].reshape(shape))
        first += parts[-1].size
    return Residency(*parts)
