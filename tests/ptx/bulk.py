"""mbarriers, and the bulk copies (TMA) that complete their phases or groups of their own.

A copy to shared memory is carried out when every thread waits, for the phase that it completes; a
copy out of it when its group is waited for. Both as late as they may be.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from tests.ptx.arithmetic import KINDS, Step, source, target
from tests.ptx.clocks import PHASES
from tests.ptx.host import TensorMap
from tests.ptx.matrix import warps_of
from tests.ptx.parse import Address, Fault, Instruction, Number, Tile

UNIT = 16
"""Bytes that are copied at once here; what TMA copies is a multiple of them."""

Key = tuple[int, int]
"""Of an mbarrier: its program, its first byte in shared memory."""


@dataclasses.dataclass
class Barrier:
    count: int
    """Of arrivals that complete a phase."""
    number: int
    """Of the mbarriers of its program."""
    arrived: int = 0
    missing: int = 0
    """Bytes that were announced and have not come."""
    phases: int = 0
    """That are complete."""
    known: np.ndarray | None = None
    """What those who arrived in this phase knew (clocks.py)."""
    behind: np.ndarray | None = None
    """What the waiters for the last complete phase know."""


@dataclasses.dataclass
class Incoming:
    """A copy to shared memory that is under way."""

    places: np.ndarray
    sources: np.ndarray
    inside: np.ndarray
    """Which parts lie in the array; the others are zeros."""
    stamp: np.ndarray


@dataclasses.dataclass
class Outgoing:
    """A copy out of shared memory that was not waited for."""

    lane: int
    group: int
    places: np.ndarray
    targets: np.ndarray
    inside: np.ndarray


class Bulk:
    """The mbarriers and bulk copies of some programs."""

    def __init__(self, m):
        self.m = m
        self.barriers: dict[Key, Barrier] = {}
        self.incoming: dict[Key, list[Incoming]] = {}
        self.outgoing: list[Outgoing] = []
        self.groups = np.zeros(m.all.size, np.int64)

    # mbarriers

    def each(self, lanes: np.ndarray, places: np.ndarray) -> Iterator[tuple[Key, np.ndarray]]:
        """(mbarrier, which of these lanes) of mbarriers at these places of shared memory."""
        cells = self.m.shared.tracker.cells(places, 8)
        self.m.shared.check(places, self.m.shared.tracker.check(cells, self.m.stamps_of(lanes)))
        for place in np.unique(places).tolist():
            key = divmod(place, self.m.shared.stride)
            if key not in self.barriers:
                raise Fault(f"byte {key[1]} of shared memory is no mbarrier")
            yield key, np.flatnonzero(places == place)

    def begin(self, lanes: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
        for lane, place, count in zip(lanes, places.tolist(), counts.tolist(), strict=True):
            key = divmod(place, self.m.shared.stride)
            old = self.barriers.get(key)
            if old is not None and (old.arrived or old.missing):
                raise Fault("an mbarrier is made anew within a phase")
            number = old.number if old else sum(program == key[0] for program, _ in self.barriers)
            if number >= PHASES:
                raise Fault(f"the interpreter knows {PHASES} mbarriers of a program at most")
            # A new one begins with an even phase.
            phases = old.phases + old.phases % 2 if old else 0
            self.barriers[key] = Barrier(count, number, phases=phases)
            one = np.array([lane])
            self.m.shared.store(
                np.array([place]), np.zeros((1, 8), np.uint8), self.m.stamps_of(one)
            )

    def arrive(self, lanes: np.ndarray, places, bytes_: np.ndarray, counts: np.ndarray) -> None:
        """These lanes announce bytes and arrive, each so many times."""
        for key, of in self.each(lanes, places):
            barrier = self.barriers[key]
            barrier.missing += int(bytes_[of].sum())
            if counts[of].any():
                barrier.arrived += int(counts[of].sum())
                known = self.m.clocks.release(np.unique(lanes[of] // 32))
                if barrier.known is not None:
                    known = np.maximum(known, barrier.known)
                barrier.known = known
                if barrier.arrived > barrier.count:
                    raise Fault(f"more than {barrier.count} arrive at an mbarrier")
            self._complete(key)

    def _complete(self, key: Key) -> None:
        barrier = self.barriers[key]
        if barrier.arrived < barrier.count or barrier.missing:
            return
        assert barrier.known is not None
        barrier.phases += 1
        known, barrier.known, barrier.arrived = barrier.known, None, 0
        known[0, self.m.clocks.warps + barrier.number] = barrier.phases
        barrier.behind = known if barrier.behind is None else np.maximum(known, barrier.behind)

    def ready(self, lanes: np.ndarray, places: np.ndarray, parities: np.ndarray) -> np.ndarray:
        """Which of these lanes need not wait: the phase of that parity is complete."""
        found = np.zeros(lanes.size, bool)
        for key, of in self.each(lanes, places):
            barrier = self.barriers[key]
            done = (barrier.phases & 1) != (parities[of] & 1)
            found[of] = done
            if done.any() and barrier.behind is not None:
                self.m.clocks.acquire(np.unique(lanes[of[done]] // 32), barrier.behind)
        return found

    # Copies

    def fetch(self, lane: np.ndarray, key: Key, places, sources, inside) -> None:
        """Begins a copy to shared memory, in the name of one lane."""
        m, stamps = self.m, np.repeat(self.m.stamps_of(lane), places.size)
        for _ in self.each(lane, np.array([key[0] * m.shared.stride + key[1]])):
            m.shared.begin(places, UNIT, stamps)
        m.memory.check_load(sources[inside], UNIT, stamps[inside])
        self.incoming.setdefault(key, []).append(Incoming(places, sources, inside, stamps))

    def land(self, keys: set[Key]) -> None:
        """Carries out the copies that complete phases of these mbarriers."""
        for key in sorted(keys & self.incoming.keys()):
            barrier, shared = self.barriers[key], self.m.shared
            for one in self.incoming.pop(key):
                values = np.zeros((one.places.size, UNIT), np.uint8)
                values[one.inside] = self.m.memory.load(
                    one.sources[one.inside], UNIT, one.stamp[one.inside]
                )
                cells = shared.tracker.cells(one.places, UNIT)
                shared.tracker.land(cells, barrier.number, barrier.phases + 1)
                shared.put(one.places, values)
                barrier.missing -= UNIT * one.places.size
            self._complete(key)

    def send(self, lane: np.ndarray, places, targets, inside) -> None:
        """Begins a copy out of shared memory."""
        self.m.shared.begin_read(places, UNIT, np.repeat(self.m.stamps_of(lane), places.size))
        group = int(self.groups[lane[0]])
        self.outgoing.append(Outgoing(int(lane[0]), group, places, targets, inside))

    def wait(self, lanes: np.ndarray, keep: int) -> None:
        """Completes all but the last `keep` groups of these lanes."""
        waits, left = set(lanes.tolist()), []
        for one in self.outgoing:
            if one.lane not in waits or one.group >= self.groups[one.lane] - keep:
                left.append(one)
                continue
            stamps = np.repeat(self.m.stamps_of(np.array([one.lane])), one.places.size)
            values = self.m.shared.end_read(one.places, UNIT, stamps)
            some = one.inside
            self.m.memory.store(one.targets[some], values[some], stamps[some])
        self.outgoing = left

    def check_ended(self) -> None:
        if self.incoming or self.outgoing:
            raise Fault("the kernel ends while a bulk copy is under way")


def _tile(m, lane: np.ndarray, tile: Tile) -> tuple[TensorMap, np.ndarray, np.ndarray]:
    """(map, addresses of a box's parts, which of them lie in the array)."""
    at = int(m.address(tile.map, lane)[0])
    found = m.maps.get(at)
    if found is None:
        raise Fault(f"no tensor map is at address {at:#x}")
    first = [
        int(
            source(o, KINDS["s32"])(m, lane)[()]
            if isinstance(o, Number)
            else m.get(o.name, KINDS["s32"], lane)[0]
        )
        for o in tile.first.items
    ][::-1]
    if len(first) != len(found.box):
        raise Fault(f"{len(first)} coordinates of a tensor map of {len(found.box)} axes")
    if found.sizes[-1] * found.item % UNIT or first[-1] * found.item % UNIT:
        raise Fault(f"the interpreter copies rows in parts of {UNIT} bytes, not of {found}")
    step = UNIT // found.item
    axes = [
        start + np.arange(0, n, step if i == len(first) - 1 else 1)
        for i, (start, n) in enumerate(zip(first, found.box, strict=True))
    ]
    grid = np.meshgrid(*axes, indexing="ij")
    inside = np.ones(grid[0].shape, bool)
    address = np.full(grid[0].shape, found.address, np.int64)
    for axis, size, stride in zip(grid, found.sizes, found.strides, strict=True):
        inside &= (axis >= 0) & (axis < size)
        address += axis * stride * found.item
    return found, address.ravel().astype(np.uint64), inside.ravel()


def _box(m, lane: np.ndarray, at: Address, found: TensorMap) -> np.ndarray:
    """Places of a box's parts in shared memory."""
    first = int(m.address(at, lane)[0])
    if first % 128:
        raise Fault(f"a tile at byte {first} of shared memory, which is no multiple of 128")
    size = math.prod(found.box) * found.item
    address = first + np.arange(0, size, UNIT)
    address ^= address >> 3 & (found.swizzle - 1) & 0x70
    return m.shared.places(address, UNIT, np.full(address.shape, m.program[lane[0]]), "copies")


def _each_lane(m, idx) -> Iterator[np.ndarray]:
    for lane in m.lanes(idx).tolist():
        yield np.array([lane])


def _refuse(ins: Instruction):
    raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")


def _line(m, lane: np.ndarray, at: Address, of: Address, size: int) -> tuple:
    """(places, addresses, inside) of a copy of `size` bytes one after the other."""
    steps = np.arange(0, size, UNIT)
    first, far = (int(m.address(one, lane)[0]) for one in (at, of))
    if size % UNIT or first % UNIT or far % UNIT:
        raise Fault(f"a bulk copy of {size} bytes at bytes {first} and {far}, not all by 16")
    program = np.full(steps.shape, m.program[lane[0]])
    places = m.shared.places(first + steps, UNIT, program, "copies")
    return places, (far + steps).astype(np.uint64), np.ones(steps.shape, bool)


def _incoming(ins: Instruction) -> Step:
    to, of, *size, barrier = ins.operands
    count = source(size[0], KINDS["u32"]) if size else None

    def step(m, idx):
        for lane in _each_lane(m, idx):
            m.check_waited()
            key = int(m.program[lane[0]]), int(m.address(barrier, lane)[0])
            if isinstance(of, Tile):
                found, addresses, inside = _tile(m, lane, of)
                parts = _box(m, lane, to, found), addresses, inside
            else:
                assert count is not None
                parts = _line(m, lane, to, of, int(np.ravel(count(m, lane))[0]))
            m.bulk.fetch(lane, key, *parts)

    return step


def _outgoing(ins: Instruction) -> Step:
    to, of, *size = ins.operands
    count = source(size[0], KINDS["u32"]) if size else None

    def step(m, idx):
        for lane in _each_lane(m, idx):
            m.check_waited()
            if isinstance(to, Tile):
                found, addresses, inside = _tile(m, lane, to)
                parts = _box(m, lane, of, found), addresses, inside
            else:
                assert count is not None
                parts = _line(m, lane, of, to, int(np.ravel(count(m, lane))[0]))
            m.bulk.send(lane, *parts)

    return step


def _copy(ins: Instruction) -> Step | None:
    """cp.async.bulk; None of other copies."""
    if ins.parts[:3] != ("cp", "async", "bulk"):
        return None
    rest = ".".join(ins.parts[3:])
    if rest == "commit_group":

        def commit(m, idx):
            m.bulk.groups[m.lanes(idx)] += 1

        return commit
    if rest in ("wait_group", "wait_group.read"):
        keep = ins.operands[0].value  # type: ignore[union-attr]
        return lambda m, idx: m.bulk.wait(m.lanes(idx), keep)
    tiled = re.sub(r"^tensor\.[1-5]d\.", "", rest)
    if re.fullmatch(r"shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes", tiled):
        return _incoming(ins)
    return _outgoing(ins) if tiled == "global.shared::cta.bulk_group" else _refuse(ins)


def _barrier(ins: Instruction) -> Step:
    rest = re.sub(r"\.(release|acquire)\.cta|\.shared(::cta)?\.b64$", "", ins.opcode)

    def places(m, idx, at):
        lanes = m.lanes(idx)
        return lanes, m.shared.places(m.address(at, idx), 8, m.program[lanes], "arrives at")

    if rest == "mbarrier.init":
        at, of = ins.operands
        count = source(of, KINDS["u32"])

        def begin(m, idx):
            lanes, found = places(m, idx, at)
            m.bulk.begin(lanes, found, np.broadcast_to(count(m, idx), lanes.shape))

        return begin
    if rest in ("mbarrier.arrive", "mbarrier.arrive.expect_tx", "mbarrier.expect_tx"):
        arrives, announces = "arrive" in rest, "expect_tx" in rest
        put = target(ins.operands[0]) if arrives else None
        at, *more = ins.operands[arrives:]
        if len(more) > 1 or (announces and not more):
            _refuse(ins)
        given = source(more[0], KINDS["u32"]) if more else lambda m, idx: 1

        def arrive(m, idx):
            lanes, found = places(m, idx, at)
            number = np.broadcast_to(given(m, idx), lanes.shape).astype(np.int64)
            nothing = np.zeros_like(number)
            counts = nothing + arrives if announces else number
            m.bulk.arrive(lanes, found, number if announces else nothing, counts)
            if put is not None:  # the state of the phase, which nothing here may use
                put(m, np.zeros(lanes.size, np.uint64), idx)

        return arrive
    if rest == "mbarrier.try_wait.parity":
        put, at = target(ins.operands[0]), ins.operands[1]
        parity = source(ins.operands[2], KINDS["u32"])

        def wait(m, idx):
            """As an instruction of the machine's: which lanes wait, at which mbarriers."""
            lanes, found = places(m, idx, at)
            ready = m.bulk.ready(lanes, found, np.broadcast_to(parity(m, idx), lanes.shape))
            put(m, np.ones(lanes.size, bool), idx)
            return ready, {divmod(p, m.shared.stride) for p in found[~ready].tolist()}

        return wait
    return _refuse(ins)


def _elect(ins: Instruction) -> Step:
    """elect.sync r|p: the first lane of the warp."""
    if ins.opcode != "elect.sync":
        _refuse(ins)
    lane, _, chosen = ins.operands[0].name.partition("|")  # type: ignore[union-attr]

    def step(m, idx):
        rows = warps_of(m, idx)
        if lane != "_":
            m.put(lane, np.zeros(rows.size, np.uint32), idx)
        m.put(chosen, np.tile(np.arange(32) == 0, len(rows)), idx)

    return step


def _fence(ins: Instruction) -> Step:
    if not ins.opcode.startswith("fence.proxy.async"):
        return lambda m, idx: None
    if ins.opcode not in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        _refuse(ins)

    def step(m, idx):
        if m.clocks is not None:
            m.clocks.fence(np.unique(m.lanes(idx) // 32))

    return step


def bind(ins: Instruction) -> Step | None:
    """The step of an instruction; None where it is none of these."""
    if ins.parts[0] == "cp":
        return _copy(ins)
    binder = {"mbarrier": _barrier, "elect": _elect, "fence": _fence}.get(ins.parts[0])
    return binder(ins) if binder else None
