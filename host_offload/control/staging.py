"""Staged transfers: from a wanted queue to the bounded list of the next step. Host code in numpy;
the device decides in the end whether an entry still fits (pallas_kernels/stage/api.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Spec, StagedTransfer
from host_offload.control.transfers import TransferLedger, Wanted
from host_offload.memory.pager import order_cells
from host_offload.memory.tables import Entry, Residency
from pallas_kernels.plan import host


def last_used(tables: Residency) -> np.ndarray:
    """int32[L, E]: the layer's clock when the resident expert was last used; −1: absent."""
    layer, cell = np.nonzero(tables.owner >= 0)
    expert = tables.owner[layer, cell]
    current = tables.cell_row[layer, cell] == tables.address[layer, expert]
    layer, cell, expert = layer[current], cell[current], expert[current]
    found = np.full_like(tables.address, -1)
    found[layer, expert] = tables.last_used[layer, cell]
    return found


class CellOrder:
    """Cells of a layer and version in the order of eviction. One that was passed over is taken, or
    its owner is more urgent than an expert that looked for a cell, and so than all later ones:
    nobody looks at it again.

    - `ranks`: by kind of queue, WantedQueue.rank of the layer.
    - `native`: as in order_cells.
    """

    def __init__(
        self,
        tables: Residency,
        layer: int,
        version: int,
        ranks: Mapping[str, np.ndarray],
        native: host.OrderCells | None,
    ):
        self._cells = order_cells(tables, layer, version, native)
        owner = tables.owner[layer][self._cells]
        self._ranks = {kind: rank[owner] for kind, rank in ranks.items()}
        self._wanted = np.maximum(*self._ranks.values()) >= 0
        self.unwanted = iter(self._cells[~self._wanted].tolist())
        """Free cells and those of experts in no queue."""
        self._less: dict[str, Iterator[tuple[int, int]]] = {}

    def less_urgent(self, kind: str) -> Iterator[tuple[int, int]]:
        """The other cells that experts of a queue may take, and their owners' places in it."""
        if kind not in self._less:
            transition, rank = self._ranks["transitions"], self._ranks[kind]
            # A transition is more urgent than every stage.
            here = self._wanted & ((kind == "transitions") | (transition < 0))
            rank = np.where(rank < 0, _LEAST_URGENT, rank)[here].tolist()
            self._less[kind] = zip(self._cells[here].tolist(), rank, strict=True)
        return self._less[kind]


_LEAST_URGENT = np.iinfo(np.int32).max


class Staging(TransferLedger):
    """Transfers of paged experts: each layer has its own cells, and a new expert evicts another
    one."""

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None]):
        super().__init__(spec, log, ("transitions", "stages"))
        self._order = host.cell_order()

    def versions_of(self, layer: np.ndarray, expert: np.ndarray, tables: Residency) -> np.ndarray:
        here = tables.address[layer, expert] >= 0
        return np.where(here, tables.version[layer, expert], -1)

    def want(self, kind: str, queue: Sequence[Wanted], tables: Residency) -> None:
        """See TransferLedger. With several versions an expert comes in the version that a miss
        fills."""
        if kind == "stages" and len(self._bytes) > 1:
            filled = tables.fill_version
            versions = [int(filled[entry.layer, entry.expert]) for entry in queue]
            pairs = zip(queue, versions, strict=True)
            queue = [entry._replace(version=version) for entry, version in pairs if version >= 0]
        super().want(kind, queue, tables)

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """See Transfers. Unwanted experts are evicted first, then less urgently wanted ones."""
        taken: dict[int, set[int]] = {}
        for t in self.in_flight:
            taken.setdefault(t.layer, set()).add(t.cell)
        order: dict[tuple[int, int], CellOrder] = {}

        def find_cell(kind: str, layer: int, expert: int, version: int) -> int | None:
            at, busy = (layer, version), taken.setdefault(layer, set())
            if at not in order:
                ranks = {name: queue.rank[layer] for name, queue in self._queues.items()}
                order[at] = CellOrder(tables, layer, version, ranks, self._order)
            for cell in order[at].unwanted:
                if cell not in busy:
                    busy.add(cell)
                    return cell
            mine = self._queues[kind].rank[layer, expert]
            for cell, rank in order[at].less_urgent(kind):
                if rank >= mine and cell not in busy:
                    busy.add(cell)
                    return cell
            return None

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
                "queued": self._queues["transitions"].count,
                "hi": high,
                "lo": int(np.sum(here)) - high,
                "absent": int(np.sum(~here)),
                "budget_bytes": int(sizes.sum()),
            }
        }
