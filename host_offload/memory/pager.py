"""The device's residency in numpy: it changes tables as plan, fill and stage do, without bytes.

It makes the decisions of pallas_kernels.plan and pallas_kernels.stage, and tests compare the two
entry by entry. Both score victims by the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.memory.arena import place_cells
from host_offload.memory.placement import ResidentSpec, place
from host_offload.memory.tables import Entry, HandOver, Move, Residency, cold_tables
from pallas_kernels.plan.host import LayerPlan, OrderCells, planner
from pallas_kernels.plan.victim import victim_key


class Referenced(NamedTuple):
    """The outcome of one reference of M layers."""

    hits: np.ndarray
    """int[M]"""
    fills: np.ndarray
    """int[M]"""
    read_through: np.ndarray
    """int[M]"""
    missing: np.ndarray
    """bool[M, E]: active experts that were not resident before."""


def resident_tables(resident: ResidentSpec, victim_weights: Sequence[int]) -> Residency:
    """Returns tables of a start with every expert resident."""
    layers, experts = resident.start.shape
    none = np.zeros(layers, np.int64)
    tables = cold_tables(none, experts, victim_weights, resident.cell_bound)
    return tables._replace(**place(resident).contents)


def order_cells(
    tables: Residency, layer: int, version: int, native: OrderCells | None = None
) -> np.ndarray:
    """int[n]: all cells of the layer and version in the order of eviction: free cells, then in the
    order in which the layer's next reference would evict their owners (plan's order: victim key,
    last use, expert id, cell).

    - `native`: the caller's pallas_kernels.plan.host.cell_order().
    """
    if native is not None and (found := native(tables, layer, version)) is not None:
        return found
    cells = np.flatnonzero((tables.cell_row[layer] >= 0) & (tables.cell_version[layer] == version))
    owner = tables.owner[layer][cells]
    free = owner < 0
    first = used = np.where(free, _NEVER_USED, tables.last_used[layer][cells])
    recency, frequency, prior = tables.victim_weights.tolist()
    if recency < 0 or frequency or prior:  # otherwise last use is the order, which ties have too
        key = victim_key(
            # The clock of the next reference, at which plan would compute it.
            tables.clock[layer] + 1 - used if recency else np.int32(1),
            tables.frequency[layer][owner] if frequency else np.int32(0),
            tables.prior[layer][owner] if prior else np.zeros_like(owner),
            tables.victim_weights,
        )
        first = np.where(free, _NO_KEY, key)
    return cells[np.lexsort((owner, used, first))]


def rank_cells(tables: Residency, layer: int, version: int) -> list[tuple[int, int]]:
    """(cell, owner; −1: free) of the cells in order_cells' order."""
    cells = order_cells(tables, layer, version)
    return list(zip(cells.tolist(), tables.owner[layer, cells].tolist(), strict=True))


class Pager:
    """Owns tables and pages experts in them, all layers in one call or layer by layer. In one call
    layers may have victim weights of their own, int32[3, L, 1].

    - `versions`: number of versions.
    """

    def __init__(self, tables: Residency, versions: int = 1):
        self.tables, self.versions = tables, versions
        self._bound: tuple[Residency, LayerPlan | None] | None = None
        """The tables that the native plan changes, and it."""

    def copy(self) -> Residency:
        """Returns a copy of the tables."""
        return self.tables.copy()

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Sets contents of some tables, as host_offload.memory.tables.with_contents does."""
        for name, values in contents.items():
            getattr(self.tables, name)[:] = values

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells within the arena, as pallas_kernels.move does."""
        tables = self.tables
        for layer, cell, row in moves:
            before, owner = tables.cell_row[layer, cell], tables.owner[layer, cell]
            if before < 0 or before == row:
                continue
            tables.cell_row[layer, cell] = row
            if owner >= 0 and tables.address[layer, owner] == before:
                tables.address[layer, owner] = row

    def hand_over(self, moves: Sequence[HandOver]) -> None:
        """Passes cells to other layers, as host_offload.memory.tables.hand_over_cells does."""
        tables = self.tables
        for giver, cell, expert, taker, at in moves:
            row, owner = tables.cell_row[giver, cell], tables.owner[giver, cell]
            same = (giver, cell) == (taker, at)
            if row < 0 or owner != expert or not (same or tables.cell_row[taker, at] < 0):
                continue
            if owner >= 0 and tables.address[giver, owner] == row:
                tables.address[giver, owner] = -1
            tables.cell_row[giver, cell] = tables.owner[giver, cell] = -1
            tables.cell_row[taker, at], tables.owner[taker, at] = row, -1
            tables.cell_version[taker, at] = tables.cell_version[giver, cell]

    def regrant(self, cells: np.ndarray) -> None:
        """Gives each layer cells[l] cells, as SlotArena.grant_cells and tables.regrant do. A layer
        loses its last cells, or gets its first ungranted ones; owners of lost cells are absent."""
        tables = self.tables
        cell_row = place_cells(tables.cell_row, cells.tolist(), range(tables.cell_row.size), 1)
        layer, cell = np.nonzero((tables.owner >= 0) & (tables.cell_row != cell_row))
        owner = tables.owner[layer, cell]
        current = tables.address[layer, owner] == tables.cell_row[layer, cell]
        tables.address[layer[current], owner[current]] = -1
        tables.owner[layer, cell] = -1
        tables.cell_row[:] = cell_row

    def reference(self, active: np.ndarray, layer: int | None = None) -> Referenced:
        """Makes one reference to the active experts of each layer, or of one layer: plan and fill,
        see pallas_kernels.plan.

        - `active`: bool[M, E].
        - `layer`: the one layer, M = 1; None: all layers.
        """
        if layer is not None:
            return self._reference_layer(active, layer)
        table, clock = self.tables, self.tables.clock
        clock += 1
        missing = active & (table.address < 0)
        hits = active ^ missing
        owned = table.owner >= 0
        current = owned & (table.cell_row == np.take_along_axis(table.address, table.owner, 1))
        pinned = current & np.take_along_axis(active, table.owner, 1)
        # A missing expert is computed in its fill version, with or without a cell.
        fill_version = table.fill_version
        read = np.where(fill_version >= 0, fill_version, -1 - fill_version)
        np.copyto(table.version, read, where=missing)
        wants = missing & (fill_version >= 0)
        filled = np.zeros_like(active)
        if wants.any():
            order = self._candidates(table, owned, pinned)
            for version in range(self.versions):
                self._fill(table, wants & (fill_version == version), order, version, filled)
        np.copyto(table.last_used, clock[:, None], where=pinned)
        np.add(table.frequency, active, out=table.frequency)
        count = np.count_nonzero
        fills = count(filled, axis=1)
        return Referenced(count(hits, axis=1), fills, count(missing, axis=1) - fills, missing)

    @property
    def layer_plan(self) -> LayerPlan | None:
        """plan for the tables; None without the native library."""
        if self._bound is None or self._bound[0] is not self.tables:
            self._bound = self.tables, planner(self.tables)
        return self._bound[1]

    def _reference_layer(self, active: np.ndarray, layer: int) -> Referenced:
        """reference of one layer's bool[1, E]: natively, since each call of numpy takes longer than
        all of a layer's experts."""
        tables, here = self.tables, slice(layer, layer + 1)
        if (plan := self.layer_plan) is None:
            rows = [*(table[here] for table in tables[:-1]), tables.victim_weights]
            return Pager(Residency(*rows), self.versions).reference(active)
        missing = active & (tables.address[here] < 0)
        _, *counts = plan(layer, active[0])
        fills, hits, read_through = np.array(counts)[:, None]
        return Referenced(hits, fills, read_through, missing)

    def _candidates(self, table: Residency, owned: np.ndarray, pinned: np.ndarray) -> np.ndarray:
        """Returns int64[M, C], each layer's cells in the order in which misses take them. Cells
        that cannot be taken are last, as −1."""
        owner = table.owner
        # A term of weight zero needs no logarithm.
        recency, frequency, prior = (table.victim_weights != 0).reshape(3, -1).any(axis=1)
        key = victim_key(
            table.clock[:, None] - table.last_used if recency else np.int32(1),
            np.take_along_axis(table.frequency, owner, 1) if frequency else np.int32(0),
            np.take_along_axis(table.prior, owner, 1) if prior else np.zeros_like(owner),
            table.victim_weights,
        )
        free = (table.cell_row >= 0) & ~pinned
        first = np.where(owned, key.astype(np.int64), _LEAST)
        first = np.where(free, first, _MOST)
        columns = owner.shape[1]
        second = np.where(owned, table.last_used, 0)
        third = owner.astype(np.int64) * columns + np.arange(columns)
        order = np.lexsort((third, second, first), axis=1)
        return np.where(np.take_along_axis(free, order, 1), order, -1)

    def _fill(
        self,
        table: Residency,
        wants: np.ndarray,
        order: np.ndarray,
        version: int,
        filled: np.ndarray,
    ) -> None:
        """Gives the n-th miss of a version the n-th candidate cell of that version."""
        layer, expert = np.nonzero(wants)
        if not layer.size:
            return
        rank = np.arange(layer.size) - np.searchsorted(layer, layer)
        if self.versions > 1:
            known = np.take_along_axis(table.cell_version, order, 1) == version
            order = np.where(known, order, -1)
            order = np.take_along_axis(order, np.argsort(order < 0, axis=1, kind="stable"), 1)
        inside = rank < order.shape[1]
        layer, expert, rank = layer[inside], expert[inside], rank[inside]
        cell = order[layer, rank]
        layer, expert, cell = layer[cell >= 0], expert[cell >= 0], cell[cell >= 0]
        row, old = table.cell_row[layer, cell], table.owner[layer, cell]
        gone = (old >= 0) & (table.address[layer, old] == row)
        table.address[layer[gone], old[gone]] = -1
        table.owner[layer, cell] = expert
        table.last_used[layer, cell] = table.clock[layer]
        table.address[layer, expert] = row
        filled[layer, expert] = True

    def stage(
        self, entries: Sequence[Entry], *, layer: int | None = None, coming: int | None = None
    ) -> np.ndarray:
        """Carries out a stage list, see pallas_kernels.stage.

        - `layer`: carries out entries of this layer only; None: of all layers.
        - `coming`: the layer whose experts a running step computes next (driver="host"). Entries of
          it and of later layers see the clock of the layer's next reference.

        Returns int32[S], 1 for each entry that was carried out.
        """
        done = np.zeros(len(entries), np.int32)
        tables, staged = self.tables, set[tuple[int, int]]()
        layers, columns = tables.owner.shape
        experts = tables.address.shape[1]
        # Single numbers, since each call of numpy takes as long as all of a layer's experts.
        known: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        """Owners of a layer's cells, now and before."""
        for i, (of, expert, version, cell) in enumerate(entries):
            if layer not in (None, of) or not (0 <= of < layers and 0 <= expert < experts):
                continue
            if not (0 <= version < self.versions and 0 <= cell < columns):
                continue
            clock = tables.clock[of] + int(coming is not None and of >= coming)
            if of not in known:
                owners = tables.owner[of].tolist()
                known[of] = owners, tuple(owners)
            owner, before = known[of]
            row, versions = tables.cell_row[of], tables.cell_version[of]
            address = tables.address[of]
            holds = [c for c, who in enumerate(owner) if who == expert] if expert in owner else []
            has = any(versions[c] == version or (of, c) in staged for c in holds)
            busy = before[cell] >= 0 and tables.last_used[of, cell] == clock
            if has or busy or (of, cell) in staged or row[cell] < 0 or versions[cell] != version:
                continue
            if (old := owner[cell]) >= 0 and address[old] == row[cell]:
                address[old] = -1
            for c in holds:
                owner[c] = tables.owner[of, c] = -1
            owner[cell] = tables.owner[of, cell] = expert
            address[expert] = row[cell]
            tables.version[of, expert] = version
            tables.last_used[of, cell] = clock - 1
            staged.add((of, cell))
            done[i] = 1
        return done


_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_NEVER_USED, _NO_KEY = np.int32(-1), np.iinfo(np.int32).min
