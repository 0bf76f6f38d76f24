"""Who wrote and who read what last, and which of it no barrier orders.

`Tracker` is exact; `Recent` asks it only about shared memory of which two accesses between barriers
may be of the same bytes.

A granule is the smallest access that a kernel makes to a memory, so that every access covers whole
granules: bytes would show nothing more. Of each granule the last write and the reads since are kept
as stamps of 64 bits: the program's barriers so far, its warp's `bar.warp.sync` since the last of
those, two flags, and the lane.
"""

from __future__ import annotations

import dataclasses

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


@dataclasses.dataclass(eq=False)
class Access:
    """What lanes of some programs did to shared memory in one instruction."""

    kind: str
    """"read", "write", "copy" (begun), "landed" (complete)."""
    first: np.ndarray
    """First bytes, by lane."""
    stamps: np.ndarray
    size: int
    low: int
    high: int
    """All of it is in these bytes of its programs."""
    behind: np.ndarray | None = None
    """bool[programs]: which of its programs have met no barrier since; None: all of them."""
    noted: bool = False
    """The tracker knows of it."""
    under_way: int = 0
    """Lanes of a copy that are not complete."""
    copy: Access | None = None
    """What has landed."""

    def met_by(self, other: Access) -> bool:
        """Whether their order may matter."""
        apart = self.low >= other.high or other.low >= self.high
        return not apart and (self.kind, other.kind) != ("read", "read")


class Recent:
    """Accesses to the shared memory of some programs since their last barriers.

    Only these may race. What is of other bytes of its programs than all of them is put down and
    no more; else all are noted in the tracker, in order, and it is asked. That nothing reads what
    nobody wrote is kept apart, since what tells it must outlive barriers.
    """

    MOST = 512
    """Accesses that are put down without the tracker."""

    def __init__(self, programs: int, stride: int, granule: int, threads: int):
        self.stride, self.granule = stride, granule
        self.tracker = Tracker(programs * stride // granule, granule, threads, shared=True)
        self.wrote = np.zeros((programs, stride // granule), bool)
        self.live = np.ones(programs, bool)
        self.whole: list[tuple[int, int]] = []
        """Bytes that all living programs have written."""
        self.accesses: list[Access] = []

    def read(self, new: Access) -> tuple[str, np.ndarray]:
        """Notes it; ("", …), or what is wrong and for which lanes."""
        if not self._is_whole(new) and (bad := ~self.wrote.reshape(-1)[self._cells(new)]).any():
            return "reads shared memory that nobody wrote", bad.any(1)
        return self._add(new)

    def write(self, new: Access, same: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """As `read`, of writes and of copies that begin. same: as of Tracker.write."""
        if not self._is_whole(new):
            self.wrote.reshape(-1)[self._cells(new)] = True
        return self._add(new, same)

    def land(self, new: Access) -> None:
        """Lanes of a copy are complete."""
        assert new.copy is not None
        new.copy.under_way -= new.first.size
        self._put_down(new)
        if new.copy.noted:
            self._note()

    def barrier(self, free: np.ndarray, live: np.ndarray) -> None:
        """Programs `free` have met a barrier; `live` have not ended. bool[programs]."""
        self.live = live
        every = not (live & ~free).any()
        left = []
        for one in self.accesses:
            if every:
                one.behind = FINE
            else:
                if one.behind is None:
                    one.behind = np.zeros(live.size, bool)
                    one.behind[one.first // self.stride] = True
                one.behind = one.behind[: live.size] & ~free & live if one.behind.size else FINE
            copy = one.copy or one
            if one.behind.any() or copy.under_way:
                left.append(one)
        self.accesses = left

    def _cells(self, one: Access) -> np.ndarray:
        return self.tracker.cells(one.first, one.size)

    def _is_whole(self, one: Access) -> bool:
        """Whether every program that lives has written all those bytes and what is between."""
        if any(low <= one.low and one.high <= high for low, high in self.whole):
            return True
        part = self.wrote[:, one.low // self.granule : -(-one.high // self.granule)]
        if not (part if self.live.all() else part[self.live]).all():
            return False
        self.whole.append((one.low, one.high))
        return True

    def _add(self, new: Access, same: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        wrong = "", FINE
        if any(new.met_by(one) for one in self.accesses):
            self._note()
            if new.kind == "read":
                wrong = self.tracker.read(self._cells(new), new.stamps)
            else:
                flag = FLAG if new.kind == "copy" else 0
                wrong = self.tracker.write(self._cells(new), new.stamps, same, flag)
            new.noted = True
        self._put_down(new)
        return wrong

    def _put_down(self, new: Access) -> None:
        self.accesses.append(new)
        if len(self.accesses) > self.MOST:
            self._note()
            self._join()

    def _note(self) -> None:
        for one in self.accesses:
            if one.noted:
                continue
            if one.kind == "read":
                self.tracker.note_read(self._cells(one), one.stamps)
            else:
                flag = FLAG if one.kind == "copy" else 0
                self.tracker.note_write(self._cells(one), one.stamps, flag)
            one.noted = True

    def _join(self) -> None:
        """The tracker knows them all: one access for all reads and one for all writes tell what to
        ask it about."""
        left = [one for one in self.accesses if (one.copy or one).under_way]
        for kinds in (("read",), ("write", "copy", "landed")):
            alike = [one for one in self.accesses if one.kind in kinds and one not in left]
            if alike:
                first = np.unique(np.concatenate([one.first // self.stride for one in alike]))
                low, high = min(one.low for one in alike), max(one.high for one in alike)
                joined = Access(kinds[0], first * self.stride, FINE, 1, low, high, noted=True)
                left.append(joined)
        self.accesses = left
