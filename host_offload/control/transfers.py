"""The life of transfers: wanted, listed for a step, carried out or skipped, used or unused."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import (
    MapRows,
    Spec,
    Stage,
    StagedTransfer,
    Stages,
    State,
    Transition,
)
from host_offload.memory.tables import Copy, Entry, HandOver, Move, Residency

Wanted = Stage | Transition

FindCell = Callable[[str, int, int, int], int | None]
"""(kind of the queue, layer, expert, version) → a cell for the expert; None without one, also for
all that are less urgent. Of a queue the more urgent experts come first."""

COUNTS = ("issued", "done", "skipped", "deferred", "cancelled", "used", "unused", "bytes")
"""Counts of transfers, by cause.

- issued: put on a step's list.
- done, skipped: what the step reported.
- deferred: wanted but not listed, since the list was full, or without a cell or staging bytes; once
  for each list that was made meanwhile.
- cancelled: left the queue before it was issued.
- used, unused: of those done, found resident by a later step, or evicted before that.
- bytes: of those done.
"""


@dataclasses.dataclass
class DeviceChanges:
    """Changes for the device, to be made in the order of the fields. A change is removed when it
    was carried out, so a change that failed is made again."""

    moves: list[Move] = dataclasses.field(default_factory=list)
    """Cells to move within the arena before the next step, in order."""
    hand_overs: list[HandOver] = dataclasses.field(default_factory=list)
    """Cells that move to another layer before the next list is carried out."""
    contents: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Table → its new contents, int32."""
    map_rows: list[MapRows] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    """Copies to begin beside the next step."""


class Flight(NamedTuple):
    transfer: StagedTransfer
    index: int
    """The place of its entry in its list."""
    between_layers: bool


class WantedQueue:
    """A queue of wanted transfers as it was given, and which of them still wait, in arrays: a
    policy may want hundreds at each layer.

    - `queue`: of Stage, or of Transition, no expert twice.
    - `shape`: (L, E).
    """

    def __init__(self, queue: Sequence[Wanted], shape: tuple[int, int]):
        self.entries = queue
        self.cause: str | None = None
        """The cause of every entry; None: each has its own."""
        if isinstance(queue, Stages):
            columns, self.cause = queue.columns, queue.cause
        else:
            columns = np.array([entry[:3] for entry in queue], np.int64).reshape(-1, 3)
        self.layer, self.expert, self.version = columns.T
        self.waits = np.ones(len(queue), bool)
        """bool[n]: not arrived yet."""
        self.count = len(queue)
        """How many wait."""
        self.rank = np.full((shape[0], shape[1] + 1), -1, np.int32)
        """int32[L, E + 1]: place in the queue as it was given, 0 the most urgent; −1: not named. In
        the last column, that of owner −1, nobody is."""
        self.rank[self.layer, self.expert] = np.arange(len(queue))

    def drop(self, places: np.ndarray) -> None:
        """Removes waiting entries, int[n]."""
        self.waits[places] = False
        self.count -= len(places)

    def arrive(self, place: tuple[int, int], version: int) -> None:
        """Removes the entry of an expert, (layer, expert), if it waits for this version."""
        i = self.rank[place]
        if i >= 0 and self.waits[i] and self.version[i] == version:
            self.waits[i] = False
            self.count -= 1


class TransferLedger(abc.ABC):
    """The queues of wanted transfers, the transfers in flight, and those that wait for a first use.

    spec.staging_bytes bounds the bytes in flight, spec.stage_entries the entries of a step.

    - `log`: called with a StagedTransfer when it is skipped, first used, or evicted unused.
    - `kinds`: of queues, `transitions` and `stages`; the first one comes first.
    """

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None], kinds: Sequence[str]):
        self.spec, self._log = spec, log
        self._bytes = [b.tolist() for b in spec.version_bytes.values()]
        """Bytes of an expert in a cell, by version and layer."""
        self._moved = [b.tolist() for b in spec.link_bytes.values()]
        """Bytes of an expert over the link, likewise; fewer if experts are decoded on the way."""
        shape = spec.layers, spec.experts
        self._queues = {kind: WantedQueue((), shape) for kind in kinds}
        self.paused = False
        self.capacity: int | None = None
        """If every expert is resident: how many fit in version 0."""
        self.flying: list[Flight] = []
        self._unused: dict[tuple[int, int], Flight] = {}
        self._since = np.full(shape, -1, np.int64)
        """int64[L, E]: the order in which the transfers in _unused were carried out; −1: none."""
        self._carried_out = 0
        self.finished: list[StagedTransfer] = []
        """Transfers that settled since the caller last took them. The caller clears it, and
        retired."""
        self.retired: list[StagedTransfer] = []
        self.changes = DeviceChanges()
        self.counts: dict[str, Counter[str]] = {}
        """Cause → COUNTS, see there."""

    @property
    def queued(self) -> int:
        """Number of wanted transfers that have not arrived."""
        return sum(queue.count for queue in self._queues.values())

    @property
    def in_flight(self) -> tuple[StagedTransfer, ...]:
        return tuple(flight.transfer for flight in self.flying)

    def flying_places(self) -> set[tuple[int, int]]:
        """(layer, expert) of the transfers in flight."""
        return {(t.layer, t.expert) for t in self.in_flight}

    def count(self, cause: str, what: str, n: int = 1) -> None:
        if cause not in self.counts:
            self.counts[cause] = Counter()
        self.counts[cause][what] += n

    # ---- what is wanted

    @abc.abstractmethod
    def versions_of(self, layer: np.ndarray, expert: np.ndarray, tables: Residency) -> np.ndarray:
        """int[n]: the versions in which experts are resident; −1: absent.

        - `layer`, `expert`: int[n].
        """

    def want(self, kind: str, queue: Sequence[Wanted], tables: Residency) -> None:
        """Replaces a queue. An expert that is no longer named is cancelled, unless it is in
        flight."""
        old, new = self._queues[kind], WantedQueue(queue, self._since.shape)
        self._queues[kind] = new
        if old.count:
            left = np.flatnonzero(old.waits)
            gone = left[new.rank[old.layer[left], old.expert[left]] < 0]
            lost = self._waiting(old, gone, self.flying_places(), tables)
            self._count_all(old, *lost, "cancelled")

    def _waiting(
        self,
        queue: WantedQueue,
        places: np.ndarray,
        flying: Collection[tuple[int, int]],
        tables: Residency,
    ) -> tuple[list[int], list[int]]:
        """Returns those of a queue's waiting entries int[n] that are neither resident nor in
        flight, and the versions that these experts have. Resident ones leave the queue."""
        if not places.size:
            return [], []
        have = self.versions_of(queue.layer[places], queue.expert[places], tables)
        stages = isinstance(queue.entries[0], Stage)
        absent = have < 0 if stages else have != queue.version[places]
        if flying:
            layer, expert = np.array([*flying]).T
            rank = queue.rank[layer, expert]
            flies = np.zeros(len(queue.entries) + 1, bool)
            flies[rank] = True  # that of experts which are not named is the last one
            ground = ~flies[places]
            queue.drop(places[~absent & ground])
            absent &= ground
        else:
            queue.drop(places[~absent])
        return places[absent].tolist(), have[absent].tolist()

    @abc.abstractmethod
    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """The next list for a step, counted as in flight: transitions before stages, each in the
        order of its queue. No expert is listed that is resident (for a transition: in that version)
        or in flight, and no cell is assigned twice."""

    def _issue(
        self,
        step: int,
        tables: Residency,
        find_cell: FindCell,
        *,
        step_bytes: float = math.inf,
        between_layers: bool = False,
    ) -> list[Entry]:
        """Lists the transfers for which find_cell finds a cell; the rest waits.

        - `step_bytes`: most bytes of the list, except its first entry.
        """
        entries: list[Entry] = []
        if self.paused or not self.queued:
            return entries
        flying = self.flying_places()
        room = self.spec.staging_bytes - sum(t.bytes for t in self.in_flight)
        full, closed = False, set[tuple[int, int]]()
        for kind, queue in self._queues.items():
            if not queue.count:
                continue
            waiting, have = self._waiting(queue, np.flatnonzero(queue.waits), flying, tables)
            late: list[int] = []
            for n, i in enumerate(waiting):
                layer, expert, version = queue.entries[i][:3]
                size = self._moved[version][layer]
                # A less urgent transfer does not overtake one without a place or bytes.
                full = full or len(entries) == self.spec.stage_entries
                full = full or size > room or (bool(entries) and size > step_bytes)
                if full:
                    late += range(n, len(waiting))
                    break
                if (layer, version) in closed or (
                    cell := find_cell(kind, layer, expert, version)
                ) is None:
                    closed.add((layer, version))
                    late.append(n)
                    continue
                cause = self._cause(queue, i, have[n])
                flying.add((layer, expert))
                room, step_bytes = room - size, step_bytes - size
                transfer = StagedTransfer(layer, expert, version, cell, size, cause, step)
                self.issue(transfer, len(entries), between_layers)
                entries.append(Entry(layer, expert, version, cell))
            late_of = [waiting[n] for n in late], [have[n] for n in late]
            self._count_all(queue, *late_of, "deferred")
        return entries

    def issue(self, transfer: StagedTransfer, index: int, between_layers: bool) -> None:
        """Records that the transfer is on a list, as entry `index`."""
        self.flying.append(Flight(transfer, index, between_layers))
        self.count(transfer.cause, "issued")

    def _cause(self, queue: WantedQueue, i: int, have: int) -> str:
        """The cause of the transfer of entry `i`, whose expert is resident in version `have`."""
        entry = queue.entries[i]
        if isinstance(entry, Stage):
            return entry.cause
        smaller = self._bytes[entry.version][entry.layer] < self._bytes[have][entry.layer]
        return "demotion" if smaller and have >= 0 else "promotion"

    def _count_all(
        self, queue: WantedQueue, places: Sequence[int], have: Sequence[int], what: str
    ) -> None:
        """Counts entries of a queue, whose experts are resident in the versions `have`."""
        if queue.cause is None:
            for i, version in zip(places, have, strict=True):
                self.count(self._cause(queue, i, version), what)
        elif places:
            self.count(queue.cause, what, len(places))

    # ---- what became of it

    def settle(self, step: int, staged: np.ndarray | None, tables: Residency | None = None) -> None:
        """Records the results of a step that was read.

        - `staged`: int32[S], 1 for each entry of its list that was carried out.
        - `tables`: after the step.
        """
        flying, self.flying = self.flying, []
        for flight in flying:
            issued = flight.transfer.issued
            if issued > step or (issued == step and flight.between_layers):
                self.flying.append(flight)
            elif issued == step and staged is not None:
                self._settle(flight, bool(staged[flight.index]))
            else:
                self._settle(flight, self.is_done(flight.transfer, tables))

    def is_done(self, transfer: StagedTransfer, tables: Residency | None) -> bool:
        """Whether a transfer of a step whose results were lost counts as carried out. tables: after
        a later step."""
        return False

    def record_transfers(self, step: int, entries: np.ndarray) -> None:
        """Records transfers that a step chose itself.

        - `entries`: int32[n, 4], layer, expert and cell of each, and 1 if it was carried out.
        """
        for layer, expert, cell, done in entries.tolist():
            size = self._moved[0][layer]
            made = StagedTransfer(
                layer, expert, 0, cell, size, Stage._field_defaults["cause"], step
            )
            self.count(made.cause, "issued")
            self._settle(Flight(made, 0, between_layers=True), bool(done))

    def settle_between_layers(self, done: np.ndarray) -> bool:
        """Records the results of the last list between layers, done int32[S]. Returns whether there
        was such a list."""
        flying, self.flying = self.flying, []
        before = len(self.finished)
        for flight in flying:
            if flight.between_layers:
                self._settle(flight, bool(done[flight.index]))
            else:
                self.flying.append(flight)
        return len(self.finished) > before

    def forget(self, step: int) -> None:
        """For a step that was never dispatched: the transfers of its list wait again."""
        for flight in self.flying:
            if flight.transfer.issued == step:
                self.count(flight.transfer.cause, "issued", -1)
                self.count(flight.transfer.cause, "deferred")
        self.flying = [f for f in self.flying if f.transfer.issued != step]

    def _settle(self, flight: Flight, done: bool) -> None:
        """Records that a transfer in flight was carried out, or skipped."""
        transfer = flight.transfer
        place = transfer.layer, transfer.expert
        if not done:
            transfer = transfer._replace(skipped=True)
            self.count(transfer.cause, "skipped")
            self._log(transfer)
        else:
            if transfer.published < 0:
                transfer = StagedTransfer(*transfer[:7], transfer.issued)
            self.count(transfer.cause, "done")
            self.count(transfer.cause, "bytes", transfer.bytes)
            for queue in self._queues.values():
                queue.arrive(place, transfer.version)
            if place in self._unused:
                self._retire(self._unused.pop(place).transfer)
            self._unused[place] = Flight(transfer, *flight[1:])
            self._since[place] = self._carried_out
            self._carried_out += 1
        self.finished.append(transfer)

    def state(self, tables: Residency) -> np.ndarray:
        """int8[L, E], see interface.State."""
        state = (tables.address >= 0).astype(np.int8)  # ABSENT and RESIDENT
        for t in self.in_flight:
            place = t.layer, t.expert
            layer, expert = np.array([place]).T
            have = int(self.versions_of(layer, expert, tables)[0])
            if state[place] == State.ABSENT:
                state[place] = State.ARRIVING
            elif have != t.version:
                more = self._bytes[t.version][t.layer] > self._bytes[have][t.layer]
                state[place] = State.PROMOTING if more else State.DEMOTING
        return state

    @abc.abstractmethod
    def stats(self, tables: Residency | None = None) -> dict[str, Any]:
        """With several versions, `precision` as plain integers: queued (waiting now), hi, lo and
        absent (experts), budget_bytes (of the cells)."""

    def transition_counts(self) -> dict[str, int]:
        """Promotions and demotions that were carried out, their bytes, how often one waited (once
        for each list made meanwhile), and those no longer wanted."""
        up, down = (self.counts.get(cause, {}) for cause in ("promotion", "demotion"))
        return {
            "promotions": up.get("done", 0),
            "demotions": down.get("done", 0),
            "deferred": up.get("deferred", 0) + down.get("deferred", 0),
            "cancelled": up.get("cancelled", 0) + down.get("cancelled", 0),
            "promoted_bytes": up.get("bytes", 0),
            "demoted_bytes": down.get("bytes", 0),
        }

    @property
    def watching(self) -> bool:
        """Whether a transfer waits for its first use."""
        return bool(self._unused)

    def watch(self, step: int, active: np.ndarray, missed: np.ndarray, tables: Residency) -> None:
        """Records which transfers the step used first, and which were evicted before any use.

        - `active`: bool[L, E], experts that the step needed.
        - `missed`: bool[L, E], those among them that were not resident.
        - `tables`: after the step.
        """
        looked = (self._since >= 0) & (active | (tables.address < 0))
        layers, experts = np.nonzero(looked)
        order = np.argsort(self._since[layers, experts])
        for place in zip(layers[order].tolist(), experts[order].tolist(), strict=True):
            flight = self._unused[place]
            transfer, same_step = flight.transfer, flight.transfer.published == step
            # A step's list is carried out behind its experts; between layers, before some of them.
            if transfer.published > step or (same_step and not flight.between_layers):
                continue
            if active[place] and not missed[place]:
                transfer = StagedTransfer(*transfer[:8], step)
            elif same_step:
                continue
            del self._unused[place]
            self._since[place] = -1
            self._retire(transfer)

    def finish(self) -> None:
        """Ends the run: transfers without a use so far count as unused."""
        for flight in self._unused.values():
            self._retire(flight.transfer)
        self._unused.clear()
        self._since.fill(-1)

    def _retire(self, transfer: StagedTransfer) -> None:
        self.count(transfer.cause, "used" if transfer.first_use >= 0 else "unused")
        self.retired.append(transfer)
        self._log(transfer)
