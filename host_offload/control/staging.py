"""Transfers ahead of need: from a wanted queue to the bounded list of the next step, and the life
of each transfer after that. Host code over numpy; the device has the last word on every entry
(pallas_kernels/stage/api.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Spec, Stage, State, Transfer, Transition
from host_offload.control.transfers import Flight, Transfers
from host_offload.memory.tables import Entry, Residency
from pallas_kernels.plan.victim import victim_key


def last_used(tables: Residency) -> np.ndarray:
    """int32[L, E]: the layer's clock when the resident expert was last used; −1: absent."""
    layer, cell = np.nonzero(tables.owner >= 0)
    expert = tables.owner[layer, cell]
    current = tables.cell_row[layer, cell] == tables.address[layer, expert]
    layer, cell, expert = layer[current], cell[current], expert[current]
    found = np.full_like(tables.address, -1)
    found[layer, expert] = tables.last_used[layer, cell]
    return found


def choose_cell(
    tables: Residency,
    layer: int,
    version: int,
    *,
    taken: Collection[int] = (),
    kept: Collection[int] = (),
) -> int | None:
    """The cell of that layer and version that makes room: the first free one, else the one whose
    owner the next reference of the layer would evict first (plan's order: victim key, last use,
    expert id, cell). None where there is none.

    taken: cells that are spoken for. kept: experts that must not go.
    """
    owner, last_used = tables.owner[layer], tables.last_used[layer]
    candidate = (tables.cell_row[layer] >= 0) & (tables.cell_version[layer] == version)
    candidate[list(taken)] = False
    free = np.flatnonzero(candidate & (owner < 0))
    if free.size:
        return int(free[0])
    cells = np.flatnonzero(candidate & ~np.isin(owner, list(kept)))
    if not cells.size:
        return None
    owner, last_used = owner[cells], last_used[cells]
    key = victim_key(
        # The clock of the reference to come, at which plan would compute it.
        tables.clock[layer] + np.int32(1) - last_used,
        tables.frequency[layer, owner],
        tables.prior[layer, owner],
        tables.victim_weights,
    )
    return int(cells[np.lexsort((cells, owner, last_used, key))[0]])


class Staging(Transfers):
    """The queue of wanted transfers, beside those in flight and those that wait for a first use.

    spec.staging_bytes bounds the bytes in flight, spec.stage_entries the entries of a step.
    log: called with a Transfer when it is skipped, first used, or evicted without use.
    """

    def __init__(self, spec: Spec, log: Callable[[Transfer], None]):
        super().__init__(log)
        self.spec = spec
        self._bytes = [b.tolist() for b in spec.version_bytes.values()]
        """Bytes of an expert in a cell, by version and layer."""
        self._moved = [b.tolist() for b in spec.link_bytes.values()]
        """The same, over the link."""
        self._queues: dict[str, dict[tuple[int, int], Stage | Transition]] = {
            "transitions": {},
            "stages": {},
        }
        self._ranks: dict[str, dict[int, dict[int, int]]] = {kind: {} for kind in self._queues}
        """By kind and layer: expert → place in the queue as it was given, 0 the most urgent."""

    @property
    def queued(self) -> int:
        """Wanted and not there yet."""
        return sum(map(len, self._queues.values()))

    # ---- what is wanted

    def want(
        self, kind: str, queue: Sequence[Stage] | Sequence[Transition], tables: Residency
    ) -> None:
        """Replaces a queue, `transitions` or `stages`; who is no longer named is cancelled."""
        new = {(entry.layer, entry.expert): entry for entry in queue}
        flying = self.flying_places()
        for place, entry in self._queues[kind].items():
            if place not in new and place not in flying and not _satisfied(entry, tables):
                self.count(self._cause(entry, tables), "cancelled")
        self._queues[kind], ranks = new, {}
        for rank, (layer, expert) in enumerate(new):
            ranks.setdefault(layer, {})[expert] = rank
        self._ranks[kind] = ranks

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """The next list for a step, counted as in flight: transitions before stages, each in the
        order of its queue.

        Nobody is copied who is resident (a transition: in that version) or in flight, and no cell
        is given twice. Who is not wanted makes room first, then who is wanted less urgently.
        """
        entries: list[Entry] = []
        if self.paused or not self.queued:
            return entries
        flying = self.flying_places()
        taken: dict[int, set[int]] = {}
        for t in self.in_flight:
            taken.setdefault(t.layer, set()).add(t.cell)
        room = self.spec.staging_bytes - sum(t.bytes for t in self.in_flight)
        full: set[tuple[int, int]] = set()
        ended = False
        for kind, queue in self._queues.items():
            for place, entry in list(queue.items()):
                layer, expert, version = entry[:3]
                if place in flying:
                    continue
                if _satisfied(entry, tables):
                    del queue[place]
                    continue
                size, cause = self._moved[version][layer], self._cause(entry, tables)
                # Nothing less urgent overtakes what the list has no place or no bytes for.
                ended = ended or len(entries) == self.spec.stage_entries or size > room
                cell = None
                if not ended and (layer, version) not in full:
                    busy = taken.setdefault(layer, set())
                    for kept in self._kept(kind, place):
                        cell = choose_cell(tables, layer, version, taken=busy, kept=kept)
                        if cell is not None:
                            break
                    if cell is None:
                        full.add((layer, version))
                if cell is None:
                    self.count(cause, "deferred")
                    continue
                taken[layer].add(cell)
                flying.add(place)
                room -= size
                transfer = Transfer(layer, expert, version, cell, size, cause, step)
                self.issue(transfer, len(entries), between_layers)
                entries.append(Entry(layer, expert, version, cell))
        return entries

    def _kept(self, kind: str, place: tuple[int, int]) -> Iterator[set[int]]:
        """Experts of the layer that must not make room for the entry: first all wanted ones, then
        those that are more urgent."""
        layer, expert = place
        transitions, stages = (self._ranks[k].get(layer, {}) for k in ("transitions", "stages"))
        yield transitions.keys() | stages.keys()
        ranks = self._ranks[kind][layer]
        urgent = {other for other, rank in ranks.items() if rank < ranks[expert]}
        yield urgent | transitions.keys() if kind == "stages" else urgent

    # ---- what became of it

    def settle(self, step: int, staged: np.ndarray | None, tables: Residency | None = None) -> None:
        """The step was read. staged int32[S]: 1 for each entry of its list that was carried out.
        An entry of an earlier step, one whose results were lost, counts as skipped. tables: after
        the step; not looked at."""
        flying, self.flying = self.flying, []
        for flight in flying:
            issued = flight.transfer.issued
            if issued > step or (issued == step and flight.between_layers):
                self.flying.append(flight)
            else:
                known = staged if issued == step else None
                self._settle(flight, known is not None and bool(known[flight.index]))

    def settle_between_layers(self, done: np.ndarray) -> bool:
        """The list that was issued last between layers is complete. done int32[S]: as staged.
        Returns whether there was one."""
        flying, self.flying = self.flying, []
        before = len(self.finished)
        for flight in flying:
            if flight.between_layers:
                self._settle(flight, bool(done[flight.index]))
            else:
                self.flying.append(flight)
        return len(self.finished) > before

    def forget(self, step: int) -> None:
        """The step was never dispatched: what its list named waits again."""
        for flight in self.flying:
            if flight.transfer.issued == step:
                self.count(flight.transfer.cause, "issued", -1)
                self.count(flight.transfer.cause, "deferred")
        self.flying = [f for f in self.flying if f.transfer.issued != step]

    def _settle(self, flight: Flight, done: bool) -> None:
        transfer = flight.transfer
        place = transfer.layer, transfer.expert
        for queue in self._queues.values():
            if done and place in queue and queue[place].version == transfer.version:
                del queue[place]
        self.land(flight, done)

    def state(self, tables: Residency) -> np.ndarray:
        """int8[L, E], see policy.State."""
        state = np.where(tables.address >= 0, State.RESIDENT, State.ABSENT).astype(np.int8)
        for t in self.in_flight:
            place = t.layer, t.expert
            if state[place] == State.ABSENT:
                state[place] = State.ARRIVING
            elif tables.version[place] != t.version:
                sizes = self._bytes[t.version], self._bytes[tables.version[place]]
                more = sizes[0][t.layer] > sizes[1][t.layer]
                state[place] = State.PROMOTING if more else State.DEMOTING
        return state

    def stats(self, tables: Residency | None = None) -> dict[str, Any]:
        """With several versions `precision`, plain integers: hi, lo and absent are experts, as of
        the tables; budget_bytes the cells'."""
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

    def _cause(self, entry: Stage | Transition, tables: Residency) -> str:
        if isinstance(entry, Stage):
            return entry.cause
        layer, place = entry.layer, (entry.layer, entry.expert)
        have = tables.version[place]
        smaller = self._bytes[entry.version][layer] < self._bytes[have][layer]
        return "demotion" if smaller and tables.address[place] >= 0 else "promotion"


def _satisfied(entry: Stage | Transition, tables: Residency) -> bool:
    place = entry.layer, entry.expert
    if tables.address[place] < 0:
        return False
    return isinstance(entry, Stage) or bool(tables.version[place] == entry.version)
