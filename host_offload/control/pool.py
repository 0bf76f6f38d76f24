"""One pool of cells for all layers: a layer that needs a cell takes that of the expert with the
least value of all layers (global LRU and LFU; the cache of fMoE, arXiv:2502.05370, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from host_offload.control.interface import Spec, StagedTransfer
from host_offload.control.staging import Staging
from host_offload.memory.budget import cells_per_layer
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry, HandOver, Residency
from pallas_kernels.plan.victim import victim_key

_NEVER = np.iinfo(np.int64).max


def by_worth(tables: Residency, layer: int) -> np.ndarray:
    """int64[L, C]: ranks of granted cells, 0 for the first to give away, _NEVER for cells that are
    not granted. The order is: free cells of `layer`, free cells of others, then by the owners'
    victim_key, of equals the least recently used.

    - `layer`: its experts are computed next. It and later layers were last referenced in the step
      before.
    """
    layers, columns = tables.owner.shape
    number = np.arange(layers)[:, None]
    # The clock of the next reference, and a step more if that is in this step.
    age = tables.clock[:, None] + np.int32(1) - tables.last_used
    age = age + (number >= layer).astype(np.int32)
    # A term of weight zero needs no logarithm.
    recency, frequency, prior = tables.victim_weights.tolist()
    key = victim_key(
        age if recency else np.int32(1),
        np.take_along_axis(tables.frequency, tables.owner, 1) if frequency else np.int32(0),
        np.take_along_axis(tables.prior, tables.owner, 1) if prior else np.zeros_like(tables.owner),
        tables.victim_weights,
    ).astype(np.int64)
    owned, granted = tables.owner >= 0, tables.cell_row >= 0
    first = np.where(owned, key, np.where(number == layer, -_NEVER, 1 - _NEVER))
    first = np.where(granted, first, _NEVER)
    every = np.broadcast_to(number, first.shape)
    sorted_by = tables.owner, every, np.where(owned, -age, 0), first
    order = np.lexsort([keys.ravel() for keys in sorted_by])
    ranks = np.empty(layers * columns, np.int64)
    ranks[order] = np.arange(len(order))
    return np.where(granted, ranks.reshape(first.shape), _NEVER)


class PooledStaging(Staging):
    """Staging with one pool of cells for all layers. Cells that move to another layer are handed
    over before the list is carried out, and so are cells that a layer's misses will fill.

    A layer has at most `cell_bound` cells at a time. An expert on a list, or needed by the routed
    layer, keeps its cell. An expert that was prefetched in this step for a later layer leaves last.
    Transfers of one version only.
    """

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None]):
        super().__init__(spec, log)
        self._step, self._layer, self._active = -1, 0, np.zeros(spec.experts, bool)
        self._room = False
        """Whether the layer's free cells are reserved for its misses."""
        self.pools = True
        """Whether policies want a pool now."""
        self.handed = 0
        """Number of cells that moved to another layer."""

    def begin_step(self, step: int, tables: Residency, pools: bool) -> None:
        """Says whether policies want a pool in the step. If not, layers get even shares of the
        cells back, the least valuable ones of other layers, and then keep their own."""
        self.pools = pools
        if pools:
            return
        have = np.sum(tables.cell_row >= 0, axis=1)
        lacking = np.array(cells_per_layer(int(have.sum()), *tables.address.shape)) - have
        if not lacking.any():
            return
        self.look(step, tables, 0, None, room=False)
        worth = self._free_to_go(tables)
        for taker in np.repeat(np.arange(len(have)), np.maximum(lacking, 0)).tolist():
            found = self._best(tables, np.where(lacking[:, None] < 0, worth, _NEVER), taker)
            if found is None:
                return
            self._hand_cell(tables, found, taker, evict=True)
            worth[found] = _NEVER
            lacking[found[0]] += 1

    def look(
        self, step: int, tables: Residency, layer: int, active: np.ndarray | None, room: bool
    ) -> None:
        """Sets the state of the step for the lists that are made next.

        - `tables`: the tables that `entries` will get; changed here if cells are handed over.
        - `layer`: the layer whose experts are computed next.
        - `active`: bool[E], experts that the layer needs; None: not known yet.
        - `room`: whether the layer gets cells for its missing experts.
        """
        self._step, self._layer, self._room = step, layer, False
        self._active = np.zeros(self.spec.experts, bool) if active is None else active
        if room:
            self._make_room(tables)
            self._room = True

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """See Transfers. The expert of least value in the pool, if there is one, is evicted: first
        among unwanted experts, then among less urgently wanted ones."""
        if not self.pools:
            return super().entries(step, tables, between_layers=between_layers)
        if not self.queued:
            return []
        if not between_layers:
            self.look(step, tables, 0, None, room=False)
        # At most moments all wanted experts are resident, and no order of victims is needed. A
        # resident expert leaves the queue and stays wanted.
        queues = {
            kind: (queue.layer[queue.waits], queue.expert[queue.waits])
            for kind, queue in self._queues.items()
        }
        order: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

        def find_cell(kind: str, layer: int, expert: int, version: int) -> int | None:
            if not order:
                order.append((*_rank_wanted(tables, queues), self._free_to_go(tables)))
            wanted, rank, worth = order[0]
            own = np.flatnonzero((tables.owner[layer] < 0) & (worth[layer] < _NEVER))
            if own.size:
                worth[layer, own[0]] = _NEVER
                return int(own[0])
            for more_urgent in (_NEVER - 1, wanted[layer, expert]):
                found = self._best(tables, np.where(rank > more_urgent, worth, _NEVER), layer)
                if found is not None:
                    place = self._hand_cell(tables, found, layer, evict=False)
                    worth[found] = _NEVER
                    return place
            return None

        return self._issue(step, tables, find_cell, between_layers=between_layers)

    def _make_room(self, tables: Residency) -> None:
        """Frees cells for the layer's misses, as far as the pool has some."""
        layer = self._layer
        missed = int(np.count_nonzero(self._active & (tables.address[layer] < 0)))
        if not missed:
            return
        worth = self._free_to_go(tables)
        free = (tables.owner[layer] < 0) & (worth[layer] < _NEVER)
        worth[layer] = np.where(free, _NEVER, worth[layer])
        for _ in range(missed - int(np.sum(free))):
            found = self._best(tables, worth, layer)
            if found is None:
                return
            self._hand_cell(tables, found, layer, evict=True)
            worth[found] = _NEVER

    def _free_to_go(self, tables: Residency) -> np.ndarray:
        """by_worth of the cells that may be given away."""
        worth = by_worth(tables, self._layer)
        for (layer, expert), flight in self._unused.items():
            if flight.transfer.issued == self._step and layer >= self._layer:
                cell = flight.transfer.cell
                if tables.owner[layer, cell] == expert:
                    worth[layer, cell] += worth.size
        for transfer in self.in_flight:
            worth[transfer.layer, transfer.cell] = _NEVER
        owner = tables.owner[self._layer]
        needed = (owner >= 0) & self._active[owner]
        kept = needed | (self._room & (owner < 0))
        worth[self._layer] = np.where(kept, _NEVER, worth[self._layer])
        return worth

    def _best(self, tables: Residency, worth: np.ndarray, layer: int) -> tuple[int, int] | None:
        """Returns (layer, cell) of the cell to give away first; of this layer only, if it can have
        no more cells. None without one."""
        if np.all(tables.cell_row[layer] >= 0):
            worth = np.where(np.arange(len(worth))[:, None] == layer, worth, _NEVER)
        place = np.unravel_index(int(np.argmin(worth)), worth.shape)
        return None if worth[place] == _NEVER else (int(place[0]), int(place[1]))

    def _hand_cell(
        self, tables: Residency, found: tuple[int, int], layer: int, *, evict: bool
    ) -> int:
        """Hands a cell over. Returns its number in the new layer. evict: also removes its owner."""
        giver, cell = found
        if giver == layer and not evict:
            return cell
        place = cell if giver == layer else int(np.argmax(tables.cell_row[layer] < 0))
        move = HandOver(giver, cell, int(tables.owner[found]), layer, place)
        Pager(tables).hand_over([move])
        self.changes.hand_overs.append(move)
        self.handed += giver != layer
        return place


def _rank_wanted(
    tables: Residency, queues: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Places in queues of layers int[n] and experts int[n], by kind, the most urgent kind first: 0
    is the most urgent, _NEVER means not in a queue. Returns those of each expert, int64[L, E], and
    of each cell's owner, int64[L, C]."""
    wanted = np.full(tables.address.shape, _NEVER)
    for kind in [*queues][::-1]:
        wanted[queues[kind]] = np.arange(len(queues[kind][0]))
    held = np.take_along_axis(wanted, np.maximum(tables.owner, 0), 1)
    return wanted, np.where(tables.owner >= 0, held, _NEVER)
