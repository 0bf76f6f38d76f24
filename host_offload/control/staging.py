"""Staged transfers: from a wanted queue to the bounded list of the next step. Host code in numpy;
the device decides in the end whether an entry still fits (pallas_kernels/stage/api.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Spec, Stage, StagedTransfer
from host_offload.control.transfers import TransferLedger, Wanted
from host_offload.memory.pager import rank_cells
from host_offload.memory.tables import Entry, Residency


def last_used(tables: Residency) -> np.ndarray:
    """int32[L, E]: the layer's clock when the resident expert was last used; −1: absent."""
    layer, cell = np.nonzero(tables.owner >= 0)
    expert = tables.owner[layer, cell]
    current = tables.cell_row[layer, cell] == tables.address[layer, expert]
    layer, cell, expert = layer[current], cell[current], expert[current]
    found = np.full_like(tables.address, -1)
    found[layer, expert] = tables.last_used[layer, cell]
    return found


def first_room(
    order: Sequence[tuple[int, int]], taken: Collection[int], kept: Collection[int]
) -> int | None:
    """The first cell in that order that can be used; None: there is none.

    - `taken`: cells that are already assigned.
    - `kept`: experts that must stay.
    """
    return next((c for c, owner in order if c not in taken and owner not in kept), None)


class Staging(TransferLedger):
    """Transfers of paged experts: each layer has its own cells, and a new expert evicts another
    one."""

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None]):
        super().__init__(spec, log, ("transitions", "stages"))
        self._ranks: dict[str, dict[int, dict[int, int]]] = {kind: {} for kind in self._queues}
        """By kind and layer: expert → place in the queue as it was given, 0 the most urgent."""

    def version_of(self, place: tuple[int, int], tables: Residency) -> int:
        return int(tables.version[place]) if tables.address[place] >= 0 else -1

    def versions_of(self, places: Sequence[tuple[int, int]], tables: Residency) -> list[int]:
        if not places:
            return []
        at = tuple(np.array(places).T)
        return np.where(tables.address[at] >= 0, tables.version[at], -1).tolist()

    def want(self, kind: str, queue: Sequence[Wanted], tables: Residency) -> None:
        """See TransferLedger. With several versions an expert comes in the version that a miss
        fills."""
        if kind == "stages" and len(self._bytes) > 1:
            filled = tables.fill_version
            versions = [int(filled[entry.layer, entry.expert]) for entry in queue]
            pairs = zip(queue, versions, strict=True)
            queue = [entry._replace(version=version) for entry, version in pairs if version >= 0]
        super().want(kind, queue, tables)
        ranks = self._ranks[kind] = {}
        for rank, (layer, expert) in enumerate(self._queues[kind]):
            ranks.setdefault(layer, {})[expert] = rank

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """See Transfers. Unwanted experts are evicted first, then less urgently wanted ones."""
        taken: dict[int, set[int]] = {}
        for t in self.in_flight:
            taken.setdefault(t.layer, set()).add(t.cell)
        full: set[tuple[int, int]] = set()
        tight: set[tuple[int, int]] = set()  # no cell of an unwanted expert is left
        orders: dict[tuple[int, int], list[tuple[int, int]]] = {}

        def find_cell(entry: Wanted) -> int | None:
            layer, expert, version = entry[:3]
            at = layer, version
            if at in full:
                return None
            if at not in orders:
                orders[at] = rank_cells(tables, layer, version)
            busy = taken.setdefault(layer, set())
            transitions, stages = (
                self._ranks[kind].get(layer, {}) for kind in ("transitions", "stages")
            )
            cell = None
            if at not in tight:
                cell = first_room(orders[at], busy, transitions.keys() | stages.keys())
            if cell is None:  # less urgent ones leave
                tight.add(at)
                ranks = stages if isinstance(entry, Stage) else transitions
                above = {} if ranks is transitions else transitions
                mine = ranks[expert]
                order = ((c, who) for c, who in orders[at] if c not in busy and who not in above)
                cell = next((c for c, who in order if ranks.get(who, mine) >= mine), None)
            if cell is None:
                full.add(at)
            else:
                busy.add(cell)
            return cell

        return self._issue(step, tables, find_cell, between_layers=between_layers)

    def stats(self, tables: Residency | None = None) -> dict[str, Any]:
        if len(self._bytes) == 1 or tables is None:
            return {}
        here, granted = tables.address >= 0, tables.cell_row >= 0
        high = int(np.sum(here & (tables.version == 0)))
        layer = np.nonzero(granted)[0]
        sizes = np.array(self._bytes)[tables.cell_version[granted], layer]
        return {
            "precision": {
                **self.transition_counts(),
                "queued": len(self._queues["transitions"]),
                "hi": high,
                "lo": int(np.sum(here)) - high,
                "absent": int(np.sum(~here)),
                "budget_bytes": int(sizes.sum()),
            }
        }
