"""Who wrote and who read what last, and which of it no barrier orders.

A granule is the smallest access that a kernel makes to a memory, so that every access covers whole
granules: bytes would show nothing more. Of each granule the last write and the reads since are kept
as stamps of 64 bits: the program's barriers so far, its warp's `bar.warp.sync` since the last of
those, two flags, and the lane.
"""

from __future__ import annotations

import numpy as np

FIRST_LANE = 32
"""Lanes count from here, so that a stamp is never 0, which is: nobody yet."""
LANE = np.int64((1 << 26) - 1)
FLAG = np.int64(1 << 26)
"""Of a write: an asynchronous copy is under way. Of a read: several lanes of this warp."""
WIDE = np.int64(1 << 27)
"""Of a read: several warps of this program."""
FOREIGN = np.int64(1)
"""Of a read: several programs."""
WARP_CLOCK = 28
EPOCH = 44

FINE = np.zeros(0, bool)


class Tracker:
    """One memory in granules: shared memory, that nobody has written, or global memory."""

    def __init__(self, granules: int, granule: int, threads: int, shared: bool):
        self.granule = granule
        self.threads = threads
        self.shared = shared
        self.written = np.zeros(granules, np.int64)
        self.read_by = np.zeros(granules, np.int64)

    def cells(self, first: np.ndarray, size: int) -> np.ndarray:
        """Granules [lanes, n] of accesses of `size` bytes that begin at these bytes."""
        return first[:, None] // self.granule + np.arange(max(size // self.granule, 1))

    def read(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[str, np.ndarray]:
        """Notes the reads; ("", …), or what is wrong and for which lanes."""
        me = np.broadcast_to(stamps[:, None], cells.shape)
        old = self.written[cells]
        if self.shared and (bad := old == 0).any():
            return "reads shared memory that nobody wrote", bad.any(1)
        if (bad := (old & FLAG) != 0).any():
            return "reads what an asynchronous copy writes that was not waited for", bad.any(1)
        if (bad := self._unordered(old, me)).any():
            return "reads what another thread wrote, nothing between (race)", bad.any(1)
        merged = self._merged(self.read_by[cells], me)
        self.read_by[cells] = merged
        lost = self.read_by[cells] != merged
        while lost.any():  # several lanes read it in this instruction
            cells, me = cells[lost], me[lost]
            merged = self._merged(self.read_by[cells], me)
            for which in (slice(None), (merged & WIDE) != 0, merged == FOREIGN):
                self.read_by[cells[which]] = merged[which]
            now = self.read_by[cells]
            lost = (now != merged) & ((now & (FLAG | WIDE)) == 0) & (now != FOREIGN)
        return "", FINE

    def write(
        self, cells: np.ndarray, stamps: np.ndarray, same: np.ndarray | None = None, flag=0
    ) -> tuple[str, np.ndarray]:
        """Notes the writes, with FLAG those of copies that are under way; as `read`. same: which
        lanes write what is there already: no race with another write of their program."""
        me = np.broadcast_to(stamps[:, None], cells.shape)
        old = self.written[cells]
        if (bad := (old & FLAG) != 0).any():
            return "writes where an asynchronous copy is under way (race)", bad.any(1)
        bad = self._unordered(old, me)
        if same is not None:
            bad &= ~(same[:, None] & self._of_one_program(old, me))
        if bad.any():
            return "writes what another thread wrote, nothing between (race)", bad.any(1)
        if (bad := self._unordered(self.read_by[cells], me)).any():
            return "writes what another thread reads, nothing between (race)", bad.any(1)
        self.written[cells] = stamp = me | flag
        if not self.shared:
            lost = self.written[cells]
            bad = (lost != stamp) & ~self._of_one_program(lost, me)
            return "several programs write it (race)", bad.any(1)
        return "", FINE

    def land(self, cells: np.ndarray, stamps: np.ndarray) -> None:
        """Copies of these lanes are complete: from now on they count as written by them."""
        self.written[cells] = np.broadcast_to(stamps[:, None], cells.shape)

    def _of_one_program(self, old: np.ndarray, me: np.ndarray) -> np.ndarray | bool:
        if self.shared:
            return True
        first = np.int64(FIRST_LANE)
        return ((old & LANE) - first) // self.threads == ((me & LANE) - first) // self.threads

    def _unordered(self, old: np.ndarray, me: np.ndarray) -> np.ndarray:
        """Which stamps `old` are of other threads' accesses that nothing orders before `me`."""
        if self.shared:  # what most accesses are: behind a barrier
            plain = ((old >> EPOCH) < (me >> EPOCH)) | (old == 0)
            if plain.all():
                return np.zeros(old.shape, bool)
        elif not old.any():
            return np.zeros(old.shape, bool)
        lanes, mine = old & LANE, me & LANE
        warp = ((lanes >> 5) == (mine >> 5)) & ((old & WIDE) == 0)
        ordered = (lanes == mine) & ((old & (FLAG | WIDE)) == 0)
        ordered |= warp & ((old >> WARP_CLOCK) < (me >> WARP_CLOCK))
        ordered |= ((old >> EPOCH) < (me >> EPOCH)) & self._of_one_program(old, me)
        return (old != 0) & ~ordered

    def _merged(self, old: np.ndarray, me: np.ndarray) -> np.ndarray:
        """The stamp that stands for the earlier reads that still matter and for this one."""
        matters = self._unordered(old, me)
        if not matters.any():
            return me
        warp = (((old & LANE) >> 5) == ((me & LANE) >> 5)) & ((old & WIDE) == 0)
        both = np.where(warp, me | FLAG, me | WIDE)
        both = np.where(self._of_one_program(old, me), both, FOREIGN)
        return np.where(matters, both, me)
