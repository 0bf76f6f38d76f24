"""One pool of cells for all layers: a layer that needs a cell takes that of the expert with the
least value of all layers (global LRU and LFU; the cache of fMoE, arXiv:2502.05370, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from host_offload.control.interface import Spec, StagedTransfer
from host_offload.control.staging import Staging
from host_offload.memory.budget import cells_per_layer
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry, HandOver, Residency
from pallas_kernels.plan.victim import victim_key

_NEVER = np.iinfo(np.int64).max


def by_worth(tables: Residency, layer: int) -> np.ndarray:
    """int[n]: the granted cells, numbered through all layers, the first to give away first: free
    cells of `layer`, free cells of others, then by the owners' victim_key, of equals the least
    recently used, the first layer's, the smallest expert.

    - `layer`: its experts are computed next. It and later layers were last referenced in the step
      before.
    """
    cells = np.flatnonzero(tables.cell_row >= 0)
    layers, columns = tables.owner.shape
    number, owner = cells // columns, tables.owner.ravel()[cells]
    owned = owner >= 0
    # The clock of the next reference, and a step more if that is in this step.
    age = (tables.clock + np.int32(1) + (np.arange(layers) >= layer).astype(np.int32))[number]
    age -= tables.last_used.ravel()[cells]
    # A term of weight zero needs no logarithm.
    recency, frequency, prior = tables.victim_weights.tolist()
    key = victim_key(
        age if recency else np.int32(1),
        tables.frequency[number, owner] if frequency else np.int32(0),
        tables.prior[number, owner] if prior else np.zeros_like(owner),
        tables.victim_weights,
    ).astype(np.int64)
    first = np.where(owned, key, np.where(number == layer, -_NEVER, 1 - _NEVER))
    # One key for the rest, as each takes a sort: ages and experts of all layers have 31 bits each.
    width = tables.address.shape[1] + 1
    rest = np.where(owned, -age.astype(np.int64) * (layers * width), 0) + number * width + owner
    return cells[np.lexsort((rest, first))]


class PoolOrder:
    """Cells that a pool may give away, in the order of eviction. As of CellOrder, nobody looks
    again at one that was passed over.

    - `cells`: int[n], as of by_worth.
    - `queues`: kind → (layers, experts) int[m] of those that wait, the most urgent first; the most
      urgent kind first.
    """

    def __init__(
        self,
        tables: Residency,
        cells: np.ndarray,
        queues: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ):
        self.wanted = np.full(tables.address.shape, _NEVER)
        """int64[L, E]: places in queues, 0 the most urgent; _NEVER: in none."""
        for kind in [*queues][::-1]:
            self.wanted[queues[kind]] = np.arange(len(queues[kind][0]))
        self._cells, self._layers = cells, cells // tables.owner.shape[1]
        owner = tables.owner.ravel()[cells]
        self._free = owner < 0
        self._ranks = np.where(self._free, _NEVER, self.wanted[self._layers, owner])
        self._taken = set[int]()
        self._looks: dict[tuple[str, int | None], Iterator[tuple[int, int]]] = {}

    def take(self, what: str, layer: int | None, more_urgent: int = -1) -> int | None:
        """Takes the next cell of a layer, or of all (None); None without one.

        - `what`: `free` cells, those of `unwanted` owners too, or a kind of queue, whose experts
          may take cells of wanted owners.
        - `more_urgent`: the last place whose owner keeps its cell.
        """
        if (look := self._looks.get((what, layer))) is None:
            here = self._free if what == "free" else (self._ranks == _NEVER) == (what == "unwanted")
            if layer is not None:
                here = here & (self._layers == layer)
            # Few are looked at: not as lists.
            pairs = zip(self._cells[here], self._ranks[here], strict=True)
            look = self._looks[what, layer] = pairs
        for cell, rank in look:
            if rank > more_urgent and cell not in self._taken:
                self._taken.add(cell)
                return int(cell)
        return None


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
        self._first = 0
        """Transfers carried out before the step began."""
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
        takers = np.repeat(np.arange(len(have)), np.maximum(lacking, 0)).tolist()
        for cell in self._free_to_go(tables).tolist():
            giver = cell // tables.owner.shape[1]
            if lacking[giver] < 0 and takers:
                self._hand_cell(tables, cell, takers.pop(0), evict=True)
                lacking[giver] += 1

    def look(
        self, step: int, tables: Residency, layer: int, active: np.ndarray | None, room: bool
    ) -> None:
        """Sets the state of the step for the lists that are made next.

        - `tables`: the tables that `entries` will get; changed here if cells are handed over.
        - `layer`: the layer whose experts are computed next.
        - `active`: bool[E], experts that the layer needs; None: not known yet.
        - `room`: whether the layer gets cells for its missing experts.
        """
        if step != self._step:
            self._first = self._carried_out
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
        order: list[PoolOrder] = []

        def find_cell(kind: str, layer: int, expert: int, version: int) -> int | None:
            if not order:
                order.append(PoolOrder(tables, self._free_to_go(tables), queues))
            within = layer if _is_full(tables, layer) else None
            found = order[0].take("free", layer)
            if found is None:
                found = order[0].take("unwanted", within)
            if found is None:
                found = order[0].take(kind, within, order[0].wanted[layer, expert])
            return None if found is None else self._hand_cell(tables, found, layer, evict=False)

        return self._issue(step, tables, find_cell, between_layers=between_layers)

    def _make_room(self, tables: Residency) -> None:
        """Frees cells for the layer's misses, as far as the pool has some."""
        layer = self._layer
        lacking = int(np.count_nonzero(self._active & (tables.address[layer] < 0)))
        if not lacking:
            return
        cells = self._free_to_go(tables)
        own = cells // tables.owner.shape[1] == layer
        free = own & (tables.owner.ravel()[cells] < 0)
        lacking -= int(np.count_nonzero(free))
        cells, others = cells[~free], ~own[~free]
        others = np.cumsum(others) * others
        room = np.count_nonzero(tables.cell_row[layer] < 0)
        for cell in cells[others <= room][: max(lacking, 0)].tolist():
            self._hand_cell(tables, cell, layer, evict=True)

    def _free_to_go(self, tables: Residency) -> np.ndarray:
        """by_worth of the cells that may be given away."""
        kept, last = np.zeros((2, *tables.owner.shape), bool)
        came = np.nonzero(self._since[self._layer :] >= self._first)
        for place in zip((came[0] + self._layer).tolist(), came[1].tolist(), strict=True):
            transfer = self._unused[place].transfer
            at = transfer.layer, transfer.cell
            if transfer.issued == self._step and tables.owner[at] == place[1]:
                last[at] = True
        for transfer in self.in_flight:
            kept[transfer.layer, transfer.cell] = True
        owner = tables.owner[self._layer]
        kept[self._layer] |= np.where(owner < 0, self._room, self._active[owner])
        cells = by_worth(tables, self._layer)
        cells = cells[~kept.ravel()[cells]]
        later = last.ravel()[cells]
        return np.concatenate([cells[~later], cells[later]])

    def _hand_cell(self, tables: Residency, found: int, layer: int, *, evict: bool) -> int:
        """Hands a cell over. Returns its number in the new layer. evict: also removes its owner."""
        giver, cell = divmod(found, tables.owner.shape[1])
        if giver == layer and not evict:
            return cell
        place = cell if giver == layer else int(np.argmax(tables.cell_row[layer] < 0))
        move = HandOver(giver, cell, int(tables.owner[giver, cell]), layer, place)
        Pager(tables).hand_over([move])
        self.changes.hand_overs.append(move)
        self.handed += giver != layer
        return place


def _is_full(tables: Residency, layer: int) -> bool:
    """Whether a layer can have no more cells."""
    return int(tables.cell_row[layer].min()) >= 0
