"""A device in numpy for transitions: an arena whose rows name what they hold, and a host that reads
each step one step late.

Every layer of a step first reads all its experts, each of which must be complete where its entry
points, then carries out its entries of the stage list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from host_offload.control.interface import Transition
from host_offload.control.transitions import ArrivingTransitions, Transitions
from host_offload.memory.pager import Pager
from host_offload.memory.placement import ResidentSpec, place
from host_offload.memory.tables import Copy, Entry, Move, Residency
from tests.host_offload.control.policy_runs import spec as policy_spec

HIDDEN = 1


def resident(start, slots: int, **changes) -> ResidentSpec:
    """A resident mode with small records; capacity is for the caller to say."""
    told = dict(slot_rows=4, record_rows=(4, 2), cells_per_slot=(1, 2), capacity=(1, 3), spares=1)
    told |= dict(step_bytes=10**9, move_bytes=10**9, columns=4)
    return ResidentSpec(slots=slots, start=np.asarray(start, np.int8), **{**told, **changes})


def spec_for(where: ResidentSpec, **changes):
    layers, experts = where.start.shape
    names = [f"v{v}" for v in range(len(where.record_rows))]
    sizes = {
        name: np.full(layers, rows * HIDDEN * 2, np.int64)
        for name, rows in zip(names, where.record_rows, strict=True)
    }
    told = dict(
        layers=layers,
        experts=experts,
        hidden=HIDDEN,
        version_bytes=sizes,
        cell_bound=where.cell_bound,
        staging_bytes=10**9,
        resident=where,
        min_cells=np.zeros(layers, np.int32),
        capacity=where.capacity,
    )
    return policy_spec(**{**told, **changes})


class StaleRead(AssertionError):
    """A step read an expert that was not complete where its entry pointed."""


class Device:
    """Arena and tables. tags int64[rows]: what each row holds, −1 nothing."""

    def __init__(self, where: ResidentSpec):
        self.where = where
        contents = place(where).contents
        layers, experts = where.start.shape
        cells = where.cell_bound
        names = dict(cell_row=cells, cell_version=cells, owner=cells, last_used=cells)
        names |= dict(address=experts, version=experts, frequency=experts, fill_version=experts)
        names |= dict(prior=experts)
        tables = {name: np.zeros((layers, width), np.int32) for name, width in names.items()}
        tables |= contents
        tables |= dict(clock=np.zeros(layers, np.int32), victim_weights=np.array([1, 0, 0]))
        self.pager = Pager(Residency(**tables), versions=len(where.record_rows))
        self.copies: dict[tuple[int, int], Copy] = {}
        self.lossy, self._count = True, itertools.count()
        self.tags = np.full(where.slots * where.slot_rows, -1)
        for (layer, expert), row in np.ndenumerate(contents["address"]):
            self._write(layer, expert, int(contents["version"][layer, expert]), row)

    def record(self, layer: int, expert: int, version: int) -> np.ndarray:
        """What the rows of a complete copy hold."""
        rows = self.where.record_rows[version]
        experts = self.where.start.shape[1]
        return ((layer * experts + expert) * 4 + version) * 100 + np.arange(rows)

    def _write(self, layer: int, expert: int, version: int, row: int) -> None:
        record = self.record(layer, expert, version)
        self.tags[row : row + len(record)] = record

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Of each record only the first half is there."""
        for layer, expert, version, row in copies:
            self._write(layer, expert, version, row)
            self.tags[row + 1 : row + self.where.record_rows[version]] = -3
            self.copies[layer, expert] = Copy(layer, expert, version, row)

    def end_copies(self, ends: Callable[[], bool]) -> dict[tuple[int, int], bool]:
        """Some of those under way; if `lossy`, every fifth one fails."""
        due = [at for at in self.copies if ends()]
        ended = {at: not (self.lossy and next(self._count) % 5 == 4) for at in due}
        for at, came in ended.items():
            copy = self.copies.pop(at)
            if came:
                self._write(*copy)
        return ended

    def move(self, moves: list[Move]) -> None:
        tables = self.pager.tables
        sources, targets = [], []
        assert len({move[:2] for move in moves}) == len(moves), "a cell is moved twice"
        for layer, cell, row in moves:
            size = self.where.record_rows[tables.cell_version[layer, cell]]
            begin = int(tables.cell_row[layer, cell])
            sources.append(set(range(begin, begin + size)))
            targets.append(set(range(row, row + size)))
        for i, target in enumerate(targets):
            for other in (*sources, *targets[:i]):
                assert not target & other, "moves overlap"
        before = self.tags.copy()  # a kernel copies them side by side
        for (_, _, row), source in zip(moves, sources, strict=True):
            self.tags[row : row + len(source)] = before[min(source) : max(source) + 1]
        self.pager.move_cells(moves)

    def step(self, entries: list[Entry]) -> np.ndarray:
        """Returns done int32[S]."""
        done = np.zeros(len(entries), np.int32)
        layers, experts = self.where.start.shape
        for layer in range(layers):
            for expert in range(experts):
                self.read(layer, expert)
            self.pager.reference(np.ones((1, experts), bool), layer)
            there = self.pager.stage(entries, layer=layer)
            for entry in itertools.compress(entries, there):
                row = int(self.pager.tables.cell_row[entry.layer, entry.cell])
                self._write(entry.layer, entry.expert, entry.version, row)
            done |= there
        return done

    def read(self, layer: int, expert: int) -> None:
        tables = self.pager.tables
        row, version = tables.address[layer, expert], tables.version[layer, expert]
        want = self.record(layer, expert, version)
        if row < 0 or not np.array_equal(self.tags[row : row + len(want)], want):
            raise StaleRead(f"layer {layer}, expert {expert}, version {version}, row {row}")


class Host:
    """Transitions beside a device. want, dispatch, read are the events; a step is read at the
    latest when the next one was dispatched. checked: its books are looked at beside what steps
    read."""

    def __init__(self, where: ResidentSpec, make=Transitions, checked=True):
        self.where, self.checked = where, checked
        self.transitions = make(spec_for(where), lambda transfer: None)
        self.device = Device(where)
        self.wanted = where.start.astype(int)
        self.backwards = False
        self.ends: Callable[[], bool] = lambda: True
        """Whether a copy beside the steps ends before the next one."""
        self.number = 0
        self.unread: list[tuple[int, np.ndarray | None, Residency]] = []
        self.readable: dict[int, set[int]] = {}
        """Step that was dispatched and not read → arena rows that it may read: those of its entries
        when it began, but for what was moved away since, which waits for the step."""
        self.kv: list[int] = []
        """Slots that KV has of those that were experts' at the start."""

    def want(self) -> None:
        """The whole queue, the last experts first if `backwards`; who is on the way counts as
        arrived."""
        have = self.transitions.version.copy()
        for t in self.transitions.in_flight:
            have[t.layer, t.expert] = t.version
        queue = tuple(
            Transition(int(layer), int(expert), int(self.wanted[layer, expert]))
            for layer, expert in np.argwhere(have != self.wanted)
        )
        queue = queue[::-1] if self.backwards else queue
        self.transitions.want("transitions", queue, self.device.pager.tables)

    def dispatch(self, *, lost: bool = False, fails: bool = False, refused: bool = False) -> None:
        """lost: its results will not be known. fails: it never reaches the device. refused: nor do
        half of the moves before it; as moejax.engine.control, the host asks for all of them again
        before anything else of the next step."""
        self._move_all()
        if refused:
            entries = self.transitions.entries(self.number, self.device.pager.tables)
            if moves := self.transitions.changes.moves:
                self._move(moves[: len(moves) // 2])
                self.transitions.forget(self.number)
                self.number += 1
                return
            self._set(entries)
        else:
            entries = self._entries()
        if fails:
            self.transitions.forget(self.number)
        else:
            self.readable[self.number] = self._addressed()
            done = self.device.step(entries)
            told = None if lost else done
            self.unread.append((self.number, told, self.device.pager.copy()))
        self.number += 1

    def aim(self, slots: int) -> None:
        """KV takes what experts can do without, and writes there at once."""
        for slot in self.transitions.aim(slots):
            self.kv.append(slot)
            begin = slot * self.where.slot_rows
            self._overwrite(range(begin, begin + self.where.slot_rows))
            self.device.tags[begin : begin + self.where.slot_rows] = -2
        self.check()

    def give_back(self, count: int) -> None:
        """KV gives its slots back, the latest first or, backwards, the first ones."""
        if not count:
            return
        kept = self.kv[count:] if self.backwards else self.kv[:-count]
        given = [slot for slot in self.kv if slot not in kept]
        self.transitions.add(given)
        self.kv = kept
        self.check()

    def _entries(self) -> list[Entry]:
        if isinstance(self.transitions, ArrivingTransitions):
            self.transitions.publish(self.number, self.device.end_copies(self.ends))
        entries = self.transitions.entries(self.number, self.device.pager.tables)
        self._move_all()
        self._set(entries)
        return entries

    def _move_all(self) -> None:
        self._move(self.transitions.changes.moves)
        self.transitions.changes.moves.clear()

    def _move(self, moves: list[Move]) -> None:
        tables = self.device.pager.tables
        moves = [move for move in moves if tables.cell_row[move.layer, move.cell] != move.row]
        for layer, cell, row in moves:
            version = int(self.transitions.cell_version[layer, cell])
            source = int(tables.cell_row[layer, cell])
            self._overwrite(self._rows(row, version))
            for rows in self.readable.values():
                rows.difference_update(self._rows(source, version))
        self.device.move(moves)

    def _set(self, entries: list[Entry]) -> None:
        self.device.pager.set_tables(self.transitions.changes.contents)
        for layer, _, version, cell in entries:
            self._overwrite(self._rows(int(self.transitions.cell_row[layer, cell]), version))
        copies = self.transitions.changes.copies
        for _, _, version, row in copies:
            self._overwrite(self._rows(row, version))
        self.device.begin_copies(copies)
        copies.clear()
        self.check()

    def _rows(self, begin: int, version: int) -> range:
        return range(begin, begin + self.where.record_rows[version])

    def _addressed(self) -> set[int]:
        tables = self.device.pager.tables
        return {
            row
            for place, begin in np.ndenumerate(tables.address)
            for row in self._rows(int(begin), int(tables.version[place]))
        }

    def _overwrite(self, rows: range) -> None:
        """Something else is to be written there."""
        if not self.checked:
            return
        for step, readable in self.readable.items():
            assert readable.isdisjoint(rows), f"step {step} can still read what is overwritten"

    def read(self) -> None:
        number, staged, tables = self.unread.pop(0)
        del self.readable[number]
        self.transitions.settle(number, staged, tables)
        self.check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.dispatch()
            if len(self.unread) > 1:
                self.read()

    def drain(self, most: int = 60) -> int:
        """Steps until nothing is wanted and nothing is in flight; the last one hands back what is
        left."""
        for count in range(most):
            if not (self.transitions.queued or self.transitions.flying or self.unread):
                self.dispatch()
                self.read()
                return count
            self.run(1)
            if not self.transitions.queued:
                while self.unread:
                    self.read()
        raise AssertionError("transitions do not finish")

    def check(self) -> None:
        """The books are sound: bytes within the budget, one owner of every arena row."""
        if not self.checked:
            return
        host, where = self.transitions, self.where
        slots = set(host.pools.slots)
        live = [
            (int(row), where.record_rows[int(host.cell_version[place])])
            for place, row in np.ndenumerate(host.cell_row)
            if row >= 0
        ]
        rows = [r for begin, size in live for r in range(begin, begin + size)]
        assert len(rows) == len(set(rows)), "two cells share arena rows"
        held = sum(size for _, size in live) * HIDDEN * 2
        assert host.used_bytes == held <= len(slots) * where.slot_rows * HIDDEN * 2
        assert {row // where.slot_rows for row in rows} <= slots, "a cell lies in a KV slot"
        assert slots.isdisjoint(self.kv) and len(slots) + len(self.kv) == where.slots

    def check_drained(self) -> None:
        host = self.transitions
        sizes = np.array(self.where.record_rows) * HIDDEN * 2
        assert not host.flying and not host.evicting
        assert host.used_bytes == int(sizes[host.version].sum())
        np.testing.assert_array_equal(self.device.pager.tables.version, host.version)
