"""What orders the accesses to shared memory in kernels whose threads meet by more than one barrier.

Each warp has a clock, and knows of the others' how far what they did is ordered before it (vector
clocks). A barrier of some warps, and the completed phase of an mbarrier, hand on what those who
arrived knew; what a bulk copy wrote is known by the phase that it completed. What the asynchronous
proxy (bulk copies, wgmma) may read of other writes is known likewise, by `fence.proxy.async`.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.tracker import FINE, FIRST_LANE, FLAG, LANE

SEEN, FENCED = 0, 1
"""Of a clock: what comes before, and what of it the asynchronous proxy may read."""
PHASES = 64
"""Of a program, mbarriers at most."""

TIME, ACTOR = 8, 40
"""In stamps of writes: five bits of the lane, UNDER_WAY, BY_COPY; the time; the warp, or behind the
warps the mbarrier, counted from one."""
UNDER_WAY, BY_COPY, SEVERAL = np.int64(1 << 5), np.int64(1 << 6), np.int64(1 << 5)
"""SEVERAL, of a read: more than one lane of the warp."""


class Clocks:
    """Of the warps of some programs, one program after the other."""

    def __init__(self, programs: int, warps: int):
        self.warps = warps
        self.known = np.zeros((programs * warps, 2, warps + PHASES), np.int64)
        self.own = np.tile(np.arange(warps), programs)
        """Which part of its clock is a warp's own."""
        self.together = np.zeros(programs * warps, np.int64)
        """The time until which what one lane of a warp did is ordered before the others."""
        self._tick(np.arange(programs * warps))

    def _tick(self, rows: np.ndarray) -> None:
        self.known[rows, SEEN, self.own[rows]] += 1

    def now(self, rows: np.ndarray) -> np.ndarray:
        return self.known[rows, SEEN, self.own[rows]]

    def release(self, rows: np.ndarray) -> np.ndarray:
        """What these warps know and did so far, together."""
        known = self.known[rows].max(0)
        self._tick(rows)
        return known

    def acquire(self, rows: np.ndarray, known: np.ndarray) -> None:
        """These warps come behind what is known."""
        self.known[rows] = np.maximum(self.known[rows], known)
        own = self.own[rows]
        self.together[rows] = np.maximum(self.together[rows], known[SEEN, own])

    def meet(self, rows: np.ndarray) -> None:
        """A barrier of these warps."""
        self.acquire(rows, self.release(rows))

    def join_lanes(self, rows: np.ndarray) -> None:
        """A barrier of each of these warps for itself."""
        self.together[rows] = self.now(rows)
        self._tick(rows)

    def fence(self, rows: np.ndarray) -> None:
        self.known[rows, FENCED] = self.known[rows, SEEN]
        self._tick(rows)


class ClockTracker:
    """As tracker.Tracker of shared memory, ordered by clocks."""

    def __init__(self, granules: int, granule: int, threads: int, clocks: Clocks):
        self.granule, self.threads, self.clocks = granule, threads, clocks
        self.of_program = granules * clocks.warps // len(clocks.own)
        self.written = np.zeros(granules, np.int64)
        self.readers = np.zeros((granules, clocks.warps), np.int64)
        """Stamp of each warp's last read."""
        self.held = np.zeros(granules, np.int32)
        """Asynchronous reads that are under way."""

    def cells(self, first: np.ndarray, size: int) -> np.ndarray:
        """Granules [lanes, n] of accesses of `size` bytes that begin at these bytes."""
        return first[:, None] // self.granule + np.arange(max(size // self.granule, 1))

    def _who(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(warps, lanes in them) of the machine's stamps, each [lanes, 1]."""
        thread = ((stamps & LANE) - FIRST_LANE) % self.threads
        program = cells[:, 0] // self.of_program
        return (program * self.clocks.warps + thread // 32)[:, None], (thread % 32)[:, None]

    def _stamp(self, rows: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        actor = (self.clocks.own[rows] + 1) << np.int64(ACTOR)
        return actor | self.clocks.now(rows) << np.int64(TIME) | lanes

    def _unordered(self, old: np.ndarray, rows, lanes, fenced: bool = False) -> np.ndarray:
        """Which writes `old` nothing orders before these; fenced: before the asynchronous proxy."""
        actor, time = (old >> ACTOR) - 1, old >> TIME & ((1 << ACTOR - TIME) - 1)
        clocks = self.clocks
        if fenced:
            by_copy = (old & BY_COPY) != 0
            known = np.where(
                by_copy, clocks.known[rows, SEEN, actor], clocks.known[rows, FENCED, actor]
            )
            return (old != 0) & (time > known)
        own = actor == clocks.own[rows]
        ordered = np.where(
            own,
            ((old & 31) == lanes) | (time <= clocks.together[rows]),
            time <= clocks.known[rows, SEEN, actor],
        )
        return (old != 0) & ~ordered

    def read(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[str, np.ndarray]:
        """Notes the reads; ("", …), or what is wrong and for which lanes."""
        wrong = self.check(cells, stamps)
        if not wrong[0]:
            self.note_read(cells, stamps)
        return wrong

    def check(self, cells: np.ndarray, stamps: np.ndarray, fenced: bool = False):
        """As `read`, which is not noted; fenced: by the asynchronous proxy."""
        old, who = self.written[cells], self._who(cells, stamps)
        if (bad := (old & UNDER_WAY) != 0).any():
            return "reads what an asynchronous copy writes that was not waited for", bad.any(1)
        if (bad := self._unordered(old, *who)).any():
            what = (
                "a copy wrote that was not waited for"
                if (old[bad] & BY_COPY).any()
                else ("another thread wrote, nothing between")
            )
            return f"reads what {what} (race)", bad.any(1)
        if fenced and (bad := self._unordered(old, *who, fenced=True)).any():
            return "reads what threads wrote, no fence.proxy.async between (race)", bad.any(1)
        return "", FINE

    def note_read(self, cells: np.ndarray, stamps: np.ndarray) -> None:
        """As `read`, but nothing is wrong."""
        rows, lanes = self._who(cells, stamps)
        me = np.broadcast_to(self.clocks.now(rows) << np.int64(TIME) | lanes, cells.shape)
        place = cells, np.broadcast_to(self.clocks.own[rows], cells.shape)
        old = self.readers[place]
        matters = (old >> TIME) > self.clocks.together[rows]
        several = matters & ((old & 63) != lanes)
        self.readers[place] = np.where(several, me | SEVERAL, me)
        lost = (self.readers[place] & 31) != (me & 31)
        self.readers[place[0][lost], place[1][lost]] |= SEVERAL

    def begin_read(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[str, np.ndarray]:
        """The asynchronous proxy reads there from now on, for these lanes."""
        wrong = self.check(cells, stamps, fenced=True)
        np.add.at(self.held, cells, 1)
        return wrong

    def end_read(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[str, np.ndarray]:
        """What begin_read began was waited for by these lanes."""
        np.subtract.at(self.held, cells, 1)
        self.note_read(cells, stamps)
        return "", FINE

    def write(self, cells: np.ndarray, stamps: np.ndarray, same=None, flag=0):
        """Notes the writes, with FLAG those of copies that are under way; as `read`. same: which
        lanes write what is there already: no race with another write."""
        old, (rows, lanes) = self.written[cells], self._who(cells, stamps)
        if (bad := (old & UNDER_WAY) != 0).any():
            return "writes where an asynchronous copy is under way (race)", bad.any(1)
        if (bad := self.held[cells] > 0).any():
            return "writes what an asynchronous copy or a product reads (race)", bad.any(1)
        bad = self._unordered(old, rows, lanes)
        if same is not None:
            bad &= ~same[:, None]
        if bad.any():
            return "writes what another thread wrote, nothing between (race)", bad.any(1)
        readers, clocks = self.readers[cells], self.clocks
        time, own = readers >> TIME, np.arange(clocks.warps) == clocks.own[rows][..., None]
        ordered = np.where(
            own,
            ((readers & 63) == lanes[..., None]) | (time <= clocks.together[rows][..., None]),
            time <= clocks.known[rows, SEEN, : clocks.warps],
        )
        if (bad := ((readers != 0) & ~ordered).any(2)).any():
            return "writes what another thread reads, nothing between (race)", bad.any(1)
        self.note_write(cells, stamps, flag)
        return "", FINE

    def note_write(self, cells: np.ndarray, stamps: np.ndarray, flag=0) -> None:
        """As `write`, but nothing is wrong."""
        under_way = UNDER_WAY if flag & FLAG else np.int64(0)
        self.written[cells] = np.broadcast_to(
            self._stamp(*self._who(cells, stamps)) | under_way, cells.shape
        )

    def land(self, cells: np.ndarray, phase: int, time: int) -> None:
        """A bulk copy that completes this phase of the mbarrier has written there."""
        actor = np.int64(self.clocks.warps + phase + 1)
        self.written[cells] = actor << np.int64(ACTOR) | np.int64(time << TIME) | BY_COPY
