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


class Counting:
    """What atomics with release and acquire order between programs: what one's threads did before
    their last barrier ahead of its atomic comes before what another's do behind the first barrier
    after a later atomic at that place; so does what the first one had learned of others by atomics
    before that barrier."""

    def __init__(self, threads: int, counts: bool):
        self.threads = threads
        self.counts = counts
        """Whether the kernel has such atomics."""
        self.log: dict[int, dict[int, int]] = {}
        """Place → what its atomics so far make known: of programs the epoch before which all comes
        before."""
        self.learned: dict[int, list[tuple[int, dict[int, int]]]] = {}
        """Program → of each epoch with atomics, what they made known to it."""

    def come(self, place: int, stamp: int) -> None:
        """The thread of this stamp carries out an atomic at the place."""
        program, epoch = ((stamp & int(LANE)) - FIRST_LANE) // self.threads, stamp >> EPOCH
        log, learned = self.log.setdefault(place, {}), self.learned.setdefault(program, [])
        if not learned or learned[-1][0] != epoch:
            learned.append((epoch, {}))
        _later(learned[-1][1], log)
        for before, known in learned:
            if before < epoch:
                _later(log, known)
        _later(log, {program: epoch})

    def orders(self, program: int, epoch: int, me: int) -> bool:
        """Whether what a program did in an epoch comes before the stamp `me`, its own or not."""
        mine, now = ((me & int(LANE)) - FIRST_LANE) // self.threads, me >> EPOCH
        if program == mine:
            return epoch < now
        learned = (known for at, known in self.learned.get(mine, ()) if at < now)
        return any(epoch < known.get(program, 0) for known in learned)

    def ordered(self, old: np.ndarray, me: np.ndarray) -> np.ndarray:
        """Which accesses `old` of other programs come before `me`, by stamps."""
        theirs, mine = (((x & LANE) - FIRST_LANE) // self.threads for x in (old, me))
        found = np.zeros(old.shape, bool)
        for program in np.unique(mine).tolist():
            for epoch, known in self.learned.get(program, ()):
                behind = (mine == program) & ((me >> EPOCH) > epoch) & (old > FOREIGN)
                for other in np.unique(theirs[behind]).tolist():
                    if other in known:
                        found |= behind & (theirs == other) & ((old >> EPOCH) < known[other])
        return found


def _later(known: dict[int, int], others: dict[int, int]) -> None:
    """Adds others' epochs to what is known."""
    for program, epoch in others.items():
        known[program] = max(epoch, known.get(program, epoch))


class Tracker:
    """One memory in granules: shared memory, that nobody has written, or global memory."""

    def __init__(
        self,
        granules: int,
        granule: int,
        threads: int,
        shared: bool,
        counting: Counting | None = None,
    ):
        self.granule = granule
        self.threads = threads
        self.counting = counting
        self.shared = shared
        self.written = np.zeros(granules, np.int64)
        self.read_by = np.zeros(granules, np.int64)
        self.readers: dict[int, dict[int, int]] = {}
        """Granule that several programs read → the last epoch of each one's, where they count."""

    def cells(self, first: np.ndarray, size: int) -> np.ndarray:
        """Granules [lanes, n] of accesses of `size` bytes that begin at these bytes."""
        return first[:, None] // self.granule + np.arange(max(size // self.granule, 1))

    def read(self, cells: np.ndarray, stamps: np.ndarray) -> tuple[str, np.ndarray]:
        """Notes the reads; ("", …), or what is wrong and for which lanes."""
        me = np.broadcast_to(stamps[:, None], cells.shape)
        old = self.written[cells]
        if (bad := (old & FLAG) != 0).any():
            return "reads what an asynchronous copy writes that was not waited for", bad.any(1)
        if (bad := self._unordered(old, me)).any():
            return "reads what another thread wrote, nothing between (race)", bad.any(1)
        self.note_read(cells, stamps)
        return "", FINE

    begin_read = end_read = read
    """Of what is read asynchronously: at its beginning and at its end."""

    def note_read(self, cells: np.ndarray, stamps: np.ndarray) -> None:
        """As `read`, but nothing is wrong."""
        me = np.broadcast_to(stamps[:, None], cells.shape)
        old, reads = self.read_by[cells], (cells, me)
        merged = self._merged(old, me)
        self.read_by[cells] = merged
        lost = self.read_by[cells] != merged
        while lost.any():  # several lanes read it in this instruction
            cells, me = cells[lost], me[lost]
            merged = self._merged(self.read_by[cells], me)
            for which in (slice(None), (merged & WIDE) != 0, merged == FOREIGN):
                self.read_by[cells[which]] = merged[which]
            now = self.read_by[cells]
            lost = (now != merged) & ((now & (FLAG | WIDE)) == 0) & (now != FOREIGN)
        if self.counting is not None and self.counting.counts:
            for stamps in (old, reads[1]):
                self._note_readers(reads[0], stamps)

    def _note_readers(self, cells: np.ndarray, stamps: np.ndarray) -> None:
        """Whose reads these are, where several programs read."""
        assert self.counting is not None
        several = (self.read_by[cells] == FOREIGN) & (stamps > FOREIGN)
        programs = ((stamps[several] & LANE) - FIRST_LANE) // self.threads
        found = np.stack([cells[several], programs, stamps[several] >> EPOCH], axis=1)
        for cell, program, epoch in np.unique(found, axis=0).tolist():  # later epochs come later
            self.readers.setdefault(cell, {})[program] = epoch

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
        if (bad := self._unordered(self.read_by[cells], me) & ~self._behind_all(cells, me)).any():
            return "writes what another thread reads, nothing between (race)", bad.any(1)
        self.written[cells] = stamp = me | flag
        if not self.shared:
            lost = self.written[cells]
            bad = (lost != stamp) & ~self._of_one_program(lost, me)
            return "several programs write it (race)", bad.any(1)
        return "", FINE

    def note_write(self, cells: np.ndarray, stamps: np.ndarray, flag=0) -> None:
        """As `write`, but nothing is wrong; also of copies that are complete: from now on these
        lanes have written there."""
        self.written[cells] = np.broadcast_to(stamps[:, None], cells.shape) | flag

    def _behind_all(self, cells: np.ndarray, me: np.ndarray) -> np.ndarray:
        """Which granules several programs read, each before `me` by their counting."""
        found = np.zeros(cells.shape, bool)
        if self.counting is None or not self.readers:
            return found
        for at in np.argwhere(self.read_by[cells] == FOREIGN).tolist():
            readers, stamp = self.readers[int(cells[*at])], int(me[*at])
            found[*at] = all(self.counting.orders(*reader, stamp) for reader in readers.items())
        return found

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
        unordered = (old != 0) & ~ordered
        if self.counting is not None and self.counting.log and unordered.any():
            unordered &= ~self.counting.ordered(old, me)
        return unordered

    def _merged(self, old: np.ndarray, me: np.ndarray) -> np.ndarray:
        """The stamp that stands for the earlier reads that still matter and for this one."""
        matters = self._unordered(old, me)
        if not matters.any():
            return me
        warp = (((old & LANE) >> 5) == ((me & LANE) >> 5)) & ((old & WIDE) == 0)
        both = np.where(warp, me | FLAG, me | WIDE)
        both = np.where(self._of_one_program(old, me), both, FOREIGN)
        return np.where(matters, both, me)
