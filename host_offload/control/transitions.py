"""Changes of version where every expert stays resident (DynaExq, section 3.3): from a wanted queue
to cells, copies and given-back cells. Host code over numpy.

The host alone says which cells there are (`cell_row`, `cell_version`): it adds the cell of a new
copy before the step that carries the copy, and takes the old one away after it. The device says
where an expert is: the step's stage list flips its entry once the bytes are there. So the host's
own books are exact once a step was read, and between two reads no entry ever points to a cell that
it could hand out:

- A cell is given back when the step that flipped the entry was read. Steps run on the device one
  after the other, and every step dispatched since then began with the flipped entry, so none of
  them reads the old cell; what is written there later comes behind all of them.
- Moves within the arena run between two steps and flip entries themselves, so the place that they
  leave is free at once. Cells of experts in flight are not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Policy, Spec, Stage, State, Transfer, Transition
from host_offload.control.reservations import BudgetTracker
from host_offload.control.rules import PolicyError, name_of
from host_offload.control.transfers import Flight, Transfers
from host_offload.memory import placement
from host_offload.memory.placement import ResidentSpec
from host_offload.memory.tables import Entry, Move, Residency

_PAGED = ("stages", "cells")
"""Fields of a Decision that mean nothing, or would take cells away, where all are resident."""

_CHANGING = ("transitions", "kv_pages")
"""Fields that need spare cells: what takes slots from experts makes room by transitions."""


def check_resident(policies: Sequence[Policy], resident: ResidentSpec) -> None:
    """Raises PolicyError for policies that cannot run where every expert is resident."""
    for policy in policies:
        if wrong := sorted(policy.writes.intersection(_PAGED)):
            raise PolicyError(
                f"policy {name_of(policy)} writes {wrong[0]!r}, and every expert is resident; "
                "leave the policy out, or use a precision that pages"
            )
        if not resident.spares and (wrong := [f for f in _CHANGING if f in policy.writes]):
            raise PolicyError(
                f"policy {name_of(policy)} writes {wrong[0]!r}, and the versions are fixed: there "
                "are no spare cells; leave the policy out, or give spares"
            )


class Transitions(Transfers):
    """The counterpart of host_offload.control.staging.Staging for spec.resident.

    spec.stage_entries bounds the copies of a step, resident.step_bytes their bytes,
    spec.staging_bytes all bytes in flight. log: as of Transfers.
    """

    def __init__(self, spec: Spec, log: Callable[[Transfer], None]):
        super().__init__(log)
        assert spec.resident is not None
        self.spec, self.resident = spec, spec.resident
        self._names = tuple(spec.version_bytes)
        self._bytes = [int(sizes[0]) for sizes in spec.version_bytes.values()]
        self._moved = [sizes.tolist() for sizes in spec.link_bytes.values()]
        """[V][L], over the link: fewer than _bytes where experts are decoded on the way."""
        self.capacity = self.resident.capacity[0]
        self._aimed = self.resident.slots
        """Slots that experts should have; they may have more, which they are to give away."""
        self._step_bytes = [0, 0]
        """The most of a step so far, and steps that were given more than resident.step_bytes."""
        placed = placement.place(spec.resident)
        self.pools = placed.pools
        self.cell_row, self.cell_version = placed.cell_row, placed.cell_version
        layers, experts = placed.row.shape
        self.column = np.broadcast_to(np.arange(experts), (layers, experts)).copy()
        """int[L, E]: the cell that each expert's entry points to, as of the last step read."""
        self.version = placed.version.copy()
        """int32[L, E], likewise."""
        self.evicting: list[tuple[int, int, int]] = []
        """(layer, cell, expert) of old copies that are to be given back before the next step."""
        self._holder = {int(row): place for place, row in np.ndenumerate(self.cell_row) if row >= 0}
        """Arena row → (layer, cell)."""
        bound = self.cell_row.shape[1]
        self._columns = [[*range(bound - 1, experts - 1, -1)] for _ in range(layers)]
        """By layer: cells without a place in the arena."""
        self.tracker = self._tracker()
        self._queue: dict[tuple[int, int], Transition] = {}
        self._moves: list[Move] = []
        self._moved_bytes = 0
        """Before the step that is being made."""
        self.keep_free = 0
        """Slots that are wanted for something else: compaction empties so many, if cells allow, and
        transitions leave them free."""
        self._compacted = np.zeros(2, np.int64)
        """Cells moved so far, and their bytes."""
        self._changed = False

    def _tracker(self) -> BudgetTracker:
        sizes = dict(zip(self._names, self._bytes, strict=True))
        tracker = BudgetTracker(*self._limits())
        for version, name in enumerate(self._names):
            nbytes = int(np.sum(self.version == version)) * sizes[name]
            reserved = tracker.try_reserve(name, nbytes)
            assert reserved, "resident_spec checked that it fits"
            tracker.commit(name, nbytes)
        return tracker

    def _limits(self) -> tuple[int, dict[str, int]]:
        """Bytes of all tiers, and by tier."""
        assert self.capacity is not None
        most = self.capacity, *self.resident.capacity[1:]
        tiers = zip(self._names, self._bytes, most, strict=True)
        limits = {name: (count + self.resident.spares) * size for name, size, count in tiers}
        return self.slots * self.resident.slot_rows * self.spec.hidden * 2, limits

    @property
    def queued(self) -> int:
        """Wanted and not there yet."""
        return len(self._queue)

    # ---- more and fewer slots

    @property
    def slots(self) -> int:
        """That experts have."""
        return len(self.pools.slots)

    def aim(self, slots: int) -> list[int]:
        """Experts should have so many slots, at most as many as they have; returns the numbers of
        those that they give up now. Called before each step until no more are asked for.

        The capacity falls at once, so a policy demotes who is too many; a slot goes when all that
        is high beside it has room, with the spares, in what is left, and when it is empty: old
        copies were given back and cells moved together, within the bounds of a step. Raises
        ValueError for fewer than all experts in the last version and the spares take.
        """
        if slots < (least := self.resident.least_slots()):
            raise ValueError(
                f"experts must keep {least} slots, for all of them in {self._names[-1]} and "
                f"{self.resident.spares} spare of each version; {slots} are left"
            )
        self._aimed = min(slots, self.slots)
        self.capacity = self.resident.most_high(self._aimed)
        gone = self.pools.remove(min(self._surplus(), self.pools.free_slots))
        self.keep_free = self._surplus()
        self.tracker.resize(*self._limits())
        return gone

    def add(self, slots: Sequence[int]) -> None:
        """Experts have these slots too, which are empty. What was aimed at is over."""
        self.pools.add(slots)
        self._aimed, self.keep_free = self.slots, 0
        self.capacity = self.resident.most_high(self.slots)
        self.tracker.resize(*self._limits())

    def _surplus(self) -> int:
        """Slots beyond those aimed at that experts can do without now. Who is on the way up or down
        counts as high."""
        high = {(int(layer), int(e)) for layer, e in np.argwhere(self.version == 0)}
        high |= {(t.layer, t.expert) for t in self.in_flight if t.version == 0}
        return max(self.slots - max(self._aimed, self.resident.least_slots(len(high))), 0)

    # ---- what is wanted

    def want(self, kind: str, queue: Sequence[Stage | Transition], tables: Residency) -> None:
        """Replaces the queue; who is no longer named is cancelled, unless in flight."""
        assert kind == "transitions", "check_resident lets no policy write stages"
        flying = self.flying_places()
        new = {(entry.layer, entry.expert): Transition(*entry[:3]) for entry in queue}
        for place, entry in self._queue.items():
            if place not in new and place not in flying and self.version[place] != entry.version:
                self.count(self._cause(entry), "cancelled")
        self._queue = new

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """The next list for a step, in the order of the queue; transitions do not ride between
        layers. Old copies of steps that were read are given back first.

        A transition for which there is no cell or no budget waits, and all behind it that want the
        same version; those that want another one go ahead, since they make room.
        """
        if between_layers:
            return []
        self._give_back()
        self._moved_bytes = 0
        if self._aimed < self.slots:
            self.keep_free = self._surplus()
        entries: list[Entry] = []
        if not self.paused and self._queue:
            self._issue_queue(step, entries)
        flying = self.flying_places()
        while self.pools.free_slots < self.keep_free and self._compact(None, flying):
            pass
        return entries

    def _issue_queue(self, step: int, entries: list[Entry]) -> None:
        flying = self.flying_places()
        room = self.spec.staging_bytes - sum(t.bytes for t in self.in_flight)
        step_room = self.resident.step_bytes
        full = False
        waiting: set[int] = set()
        for place, entry in list(self._queue.items()):
            layer, expert, version = entry
            if place in flying:
                continue
            if self.version[place] == version:
                del self._queue[place]
                continue
            size, cause = self._moved[version][layer], self._cause(entry)
            # Nothing less urgent overtakes what the list has no place or no bytes for.
            full = full or len(entries) == self.spec.stage_entries
            full = full or size > room or (bool(entries) and size > step_room)
            row = None
            if not full and version not in waiting and self._columns[layer]:
                row = self._reserve(version, flying)
                if row is None:
                    waiting.add(version)
            if row is None:
                self.count(cause, "deferred")
                continue
            cell = self._columns[layer].pop()
            self.cell_row[layer, cell], self.cell_version[layer, cell] = row, version
            self._holder[row] = layer, cell
            self._changed = True
            flying.add(place)
            room, step_room = room - size, step_room - size
            transfer = Transfer(layer, expert, version, cell, size, cause, step)
            # Carried out before the step's layers, if blocking; else behind each one's experts.
            self.issue(transfer, len(entries), self.resident.blocking)
            entries.append(Entry(layer, expert, version, cell))
        given = self.resident.step_bytes - step_room
        self._step_bytes[0] = max(self._step_bytes[0], given)
        self._step_bytes[1] += given > self.resident.step_bytes

    def _reserve(self, version: int, flying: set[tuple[int, int]]) -> int | None:
        """The arena row of a cell of that version, its bytes reserved."""
        tier, size = self._names[version], self._bytes[version]
        if not self.tracker.try_reserve(tier, size):
            return None
        row = self.pools.allocate(version, self.keep_free)
        while row is None and self._compact(version, flying):
            row = self.pools.allocate(version, self.keep_free)
        if row is None:
            self.tracker.cancel(tier, size)
        return row

    def _compact(self, wanting: int | None, flying: set[tuple[int, int]]) -> bool:
        """Moves cells of another version than the one that wants a cell (None: of any) together, so
        that a slot becomes free; False where nothing can be moved before this step."""

        def movable(row: int) -> bool:
            layer, cell = self._holder[row]
            here = np.flatnonzero(self.column[layer] == cell)
            return here.size == 1 and (layer, int(here[0])) not in flying

        for version, size in enumerate(self._bytes):
            most = (self.resident.move_bytes - self._moved_bytes) // size
            most = max(most, int(self._moved_bytes == 0))
            per_slot = self.pools.cells_per_slot[version]
            if version == wanting or most < 1 or self.pools.free_cells(version) < per_slot:
                continue
            pairs = self.pools.compact(version, movable, most)
            for source, target in pairs:
                layer, cell = self._holder[target] = self._holder.pop(source)
                self.cell_row[layer, cell] = target
                self._moves.append(Move(layer, cell, target))
            if pairs:
                self._changed = True
                self._moved_bytes += len(pairs) * size
                self._compacted += np.array([len(pairs), len(pairs) * size])
                return True
        return False

    def _give_back(self) -> None:
        for layer, cell, _ in self.evicting:
            self._drop(layer, cell)
            version = int(self.cell_version[layer, cell])
            self.tracker.release(self._names[version], self._bytes[version])
        self.evicting.clear()

    def _drop(self, layer: int, cell: int) -> None:
        """The cell is nobody's; its place in the arena is free."""
        row = int(self.cell_row[layer, cell])
        del self._holder[row]
        self.pools.release(row)
        self.cell_row[layer, cell] = -1
        self._columns[layer].append(cell)
        self._changed = True

    # ---- what became of it

    def settle(self, step: int, staged: np.ndarray | None, tables: Residency | None = None) -> None:
        """The step was read. staged int32[S]: 1 for each entry of its list that was carried out.
        tables: after the step; they tell of earlier steps whose results were lost."""
        flying, self.flying = self.flying, []
        for flight in flying:
            transfer = flight.transfer
            if transfer.issued > step:
                self.flying.append(flight)
                continue
            if transfer.issued == step and staged is not None:
                done = bool(staged[flight.index])
            else:
                assert tables is not None, "a lost step is known by its tables only"
                done = bool(tables.owner[transfer.layer, transfer.cell] == transfer.expert)
            self._settle(flight, done)

    def _settle(self, flight: Flight, done: bool) -> None:
        transfer = flight.transfer
        place, cell = (transfer.layer, transfer.expert), transfer.cell
        tier = self._names[transfer.version]
        if done:
            self.tracker.commit(tier, self._bytes[transfer.version])
            self.evicting.append((transfer.layer, int(self.column[place]), transfer.expert))
            self.column[place], self.version[place] = cell, transfer.version
            if place in self._queue and self._queue[place].version == transfer.version:
                del self._queue[place]
        else:
            self.tracker.cancel(tier, self._bytes[transfer.version])
            self._drop(transfer.layer, cell)
        self.land(flight, done)

    def settle_between_layers(self, done: np.ndarray) -> bool:
        """Nothing rides between layers."""
        return False

    def forget(self, step: int) -> None:
        """The step failed on its way to the device, which may have seen a part of it: the tables of
        the next step that is read tell what of its list was carried out."""

    # ---- what there is

    def take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def take_contents(self) -> dict[str, np.ndarray]:
        if not self._changed:
            return {}
        self._changed = False
        return {"cell_row": self.cell_row.copy(), "cell_version": self.cell_version.copy()}

    def state(self, tables: Residency) -> np.ndarray:
        """int8[L, E], see policy.State."""
        state = np.where(tables.address >= 0, State.RESIDENT, State.ABSENT).astype(np.int8)
        for layer, _, expert in self.evicting:
            state[layer, expert] = State.EVICTING
        for t in self.in_flight:
            more = t.cause == "promotion"
            state[t.layer, t.expert] = State.PROMOTING if more else State.DEMOTING
        return state

    def stats(self, tables: Residency | None = None) -> dict[str, Any]:
        """precision: plain integers. deferred: how often one had to wait, each for each list.
        queued: who waits now. peak_bytes: since the budget changed. most_step_bytes,
        over_step_bytes: the most bytes of a step's transitions, and steps with more than the bound,
        which is smaller than one expert then."""
        moves, moved_bytes = self._compacted.tolist()
        low = len(self._bytes) - 1
        return {
            "precision": {
                **self.transition_counts(),
                "queued": self.queued,
                "moves": moves,
                "moved_bytes": moved_bytes,
                "hi": int(np.sum(self.version == 0)),
                "lo": int(np.sum(self.version != 0)),
                "absent": 0,
                "spare_hi": self.pools.free_cells(0),
                "spare_lo": self.pools.free_cells(low) if low else 0,
                "free_slots": self.pools.free_slots,
                "slots": self.slots,
                "hi_capacity": self.capacity,
                "peak_bytes": self.tracker.peak,
                "budget_bytes": self.tracker.budget,
                "step_bytes": self.resident.step_bytes,
                "step_bytes_from": self.resident.step_bytes_from,
                "most_step_bytes": self._step_bytes[0],
                "over_step_bytes": self._step_bytes[1],
            }
        }

    def _cause(self, entry: Transition) -> str:
        have = self.version[entry.layer, entry.expert]
        return "demotion" if self._bytes[entry.version] < self._bytes[have] else "promotion"
