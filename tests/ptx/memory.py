"""Global, shared and local memory, and the asynchronous copies between the first two."""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import numpy as np

from tests.ptx.clocks import Clocks, ClockTracker
from tests.ptx.parse import Fault
from tests.ptx.tracker import FLAG, Counting, Tracker

REGION = 36
"""Each buffer has 2^36 addresses of its own: what runs over its end meets no other."""


@dataclasses.dataclass
class Buffer:
    """An argument of a launch in global memory."""

    name: str
    data: np.ndarray
    """uint8, one after the other."""
    writable: bool = True


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.zeros, whose large arrays take memory by pages from the first write on, but at the
    start of a page, so that jax.device_put makes no copy."""
    count = math.prod(shape)
    # Private: reading a page of zeros takes none of its own, of shared memory it would.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=flags)
    return np.frombuffer(pages, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)


def copy_sparse(to: np.ndarray, of: np.ndarray, part: int = 1 << 16) -> None:
    """Copies bytes to where zeros are, but no parts of zeros, which so take no memory (zeros)."""
    whole = of.size // part * part
    words = of[:whole].view(np.uint64 if of.ctypes.data % 8 == 0 else np.uint8)
    for number in np.flatnonzero(words.reshape(whole // part, -1).any(1)) if whole else ():
        to[number * part : (number + 1) * part] = of[number * part : (number + 1) * part]
    to[whole:] = of[whole:]


class GlobalMemory:
    """The buffers of one launch; accesses are checked, and races between programs found in those
    that the kernel may write. counts: whether its programs have atomics."""

    def __init__(
        self, buffers: list[Buffer], granule: int, threads: int, alignments: list[int], counts: bool
    ):
        self.buffers = buffers
        self.alignments = alignments
        self.counting = Counting(threads, counts)
        self.trackers = [
            Tracker(b.data.size // granule + 1, granule, threads, False, self.counting)
            if b.writable
            else None
            for b in buffers
        ]

    def address(self, number: int) -> int:
        """Of the first byte of a buffer: no better aligned than XLA promises."""
        return ((number + 1) << REGION) + self.alignments[number]

    def load(self, addresses: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """uint8[lanes, size]."""
        out = None
        for number, lanes, first in self._places(addresses, size, "reads"):
            self._read(number, first, size, stamps[lanes])
            values = taken(self.buffers[number].data, first, size)
            if len(values) == addresses.size:
                return values
            out = np.empty((addresses.size, size), np.uint8) if out is None else out
            out[lanes] = values
        return np.empty((0, size), np.uint8) if out is None else out

    def check_load(self, addresses: np.ndarray, size: int, stamps: np.ndarray) -> None:
        """As `load`, but the values are not wanted."""
        for number, lanes, first in self._places(addresses, size, "reads"):
            self._read(number, first, size, stamps[lanes])

    def _read(self, number: int, first: np.ndarray, size: int, stamps: np.ndarray) -> None:
        if (tracker := self.trackers[number]) is not None:
            wrong = tracker.read(tracker.cells(first, size), stamps)
            self._check(number, first, size, wrong)

    def store(self, addresses: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        """values: uint8[lanes, size]."""
        size = values.shape[1]
        for number, lanes, first in self._places(addresses, size, "writes"):
            buffer, tracker = self.buffers[number], self.trackers[number]
            if tracker is None:
                raise Fault(f"writes {buffer.name}, which is no result of this kernel")
            rows, some = _rows(buffer.data, size), values[lanes]
            same = (rows[first // size] == some).all(1)
            self._check(
                number, first, size, tracker.write(tracker.cells(first, size), stamps[lanes], same)
            )
            rows[first // size] = some
            twice = (rows[first // size] != some).any(1)
            self._check(number, first, size, (TWO_VALUES, twice))

    def atomic(
        self, does: np.ufunc, addresses: np.ndarray, values: np.ndarray, stamps: np.ndarray
    ) -> np.ndarray:
        """does(what is there, value), one lane after the other, with acquire and release: what was
        there before each. values: 32-bit integers. No other access may be at the same place, but
        those that come before all of these or behind them."""
        before = np.empty_like(values)
        for number, lanes, first in self._places(addresses, 4, "changes"):
            buffer, tracker = self.buffers[number], self.trackers[number]
            if tracker is None:
                raise Fault(f"writes {buffer.name}, which is no result of this kernel")
            words, cells = buffer.data.view(values.dtype), tracker.cells(first, 4)
            of = np.arange(values.size)[lanes]
            for lane, place, cell in zip(of, first // 4, cells, strict=True):
                stamp, key = stamps[lane : lane + 1], (number << REGION) + int(place)
                if key not in self.counting.log:  # later ones follow another atomic
                    wrong = tracker.write(cell[None], stamp)
                    self._check(number, place[None] * 4, 4, wrong)
                tracker.note_write(cell[None], stamp)
                self.counting.come(key, int(stamp[0]))
                before[lane] = words[place]
                words[place] = does(words[place], values[lane])
        return before

    def _places(self, addresses: np.ndarray, size: int, verb: str):
        """(buffer, lanes, first bytes) for each buffer that these addresses are in."""
        signed = addresses.astype(np.int64)
        if not signed.size:
            return
        low, high = ((int(end) >> REGION) - 1 for end in (signed.min(), signed.max()))
        regions = None if low == high else (signed >> REGION) - 1
        for number in (low,) if regions is None else np.unique(regions).tolist():
            lanes = slice(None) if regions is None else np.flatnonzero(regions == number)
            if not 0 <= number < len(self.buffers):
                raise Fault(f"{verb} address {signed[lanes][0]:#x}, where no buffer is")
            buffer = self.buffers[number]
            first = signed[lanes] - self.address(number)
            if first.min() < 0 or first.max() + size > buffer.data.size:
                bad = (first < 0) | (first + size > buffer.data.size)
                raise Fault(
                    f"{verb} {size} bytes at byte {first[bad][0]} of {buffer.name}, out of bounds: "
                    f"it has {buffer.data.size} ({bad.sum()} lanes)"
                )
            if (bad := (signed[lanes] & (size - 1)) != 0).any():
                raise Fault(
                    f"{verb} {size} bytes misaligned at byte {first[bad][0]} of {buffer.name}"
                )
            if self.alignments[number] % size:
                raise Fault(f"the interpreter needs buffers aligned to {size}: {buffer.name}")
            yield number, lanes, first

    def _check(self, number: int, first: np.ndarray, size: int, wrong: tuple) -> None:
        what, bad = wrong
        if bad.any():
            raise Fault(
                f"{what}: {size} bytes at byte {first[bad][0]} of {self.buffers[number].name}"
            )


TWO_VALUES = "several threads write different values at once (race)"


class SharedMemory:
    """Shared memory of some programs, one after the other. clocks: what orders accesses, where it
    is more than one barrier."""

    def __init__(
        self, programs: int, size: int, granule: int, threads: int, clocks: Clocks | None = None
    ):
        self.size = size
        self.stride = -(-size // 128) * 128
        self.data = np.zeros(programs * self.stride, np.uint8)
        granules = programs * self.stride // granule
        self.tracker: Any = (
            Tracker(granules, granule, threads, shared=True)
            if clocks is None
            else ClockTracker(granules, granule, threads, clocks)
        )

    def places(self, addresses: np.ndarray, size: int, programs: np.ndarray, verb: str):
        """First bytes in `data` of accesses of `size` bytes."""
        first = addresses.astype(np.int64)
        low, high = int(first.min(initial=self.size)), int(first.max(initial=-size)) + size
        if low < 0 or high > self.size:
            bad = (first < 0) | (first + size > self.size)
            raise Fault(
                f"{verb} {size} bytes at byte {first[bad][0]} of shared memory, out of bounds: "
                f"it has {self.size}"
            )
        if (bad := (first & (size - 1)) != 0).any():
            raise Fault(f"{verb} {size} bytes misaligned at byte {first[bad][0]} of shared memory")
        return first + programs * self.stride

    def load(self, first: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        self.check(first, self.tracker.read(self._written(first, size), stamps))
        return taken(self.data, first, size)

    def _written(self, first: np.ndarray, size: int) -> np.ndarray:
        """The granules there, which must have been written."""
        cells = self.tracker.cells(first, size)
        nobody = (self.tracker.written[cells] == 0).any(1)
        self.check(first, ("reads shared memory that nobody wrote", nobody))
        return cells

    def begin_read(self, first: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """What lies there, which is read asynchronously from now on."""
        self.check(first, self.tracker.begin_read(self._written(first, size), stamps))
        return taken(self.data, first, size)

    def end_read(self, first: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """What lies there at the end of what begin_read began."""
        self.check(first, self.tracker.end_read(self.tracker.cells(first, size), stamps))
        return taken(self.data, first, size)

    def store(self, first: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        size = values.shape[1]
        same = (taken(self.data, first, size) == values).all(1)
        self.check(first, self.tracker.write(self.tracker.cells(first, size), stamps, same))
        self.put(first, values)
        twice = (taken(self.data, first, size) != values).any(1)
        self.check(first, (TWO_VALUES, twice))

    def begin(self, first: np.ndarray, size: int, stamps: np.ndarray) -> None:
        """An asynchronous copy to these places is under way."""
        cells = self.tracker.cells(first, size)
        self.check(first, self.tracker.write(cells, stamps, flag=FLAG))

    def land(self, first: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        """A copy is complete there."""
        self.tracker.note_write(self.tracker.cells(first, values.shape[1]), stamps)
        self.put(first, values)

    def put(self, first: np.ndarray, values: np.ndarray) -> None:
        size = values.shape[1]
        kind, values = WORDS[size], np.ascontiguousarray(values)
        self.data.view(kind)[first // size] = values.view(kind)[:, 0]

    def check(self, first: np.ndarray, wrong: tuple) -> None:
        """Raises Fault where something is wrong there."""
        what, bad = wrong
        if bad.any():
            place = first[bad][0]
            raise Fault(
                f"{what}: byte {place % self.stride} of shared memory, "
                f"program {place // self.stride} of these"
            )


class LocalMemory:
    """Each lane's own."""

    def __init__(self, lanes: int, size: int):
        self.data = np.zeros((lanes, size), np.uint8)
        self.written = np.zeros((lanes, size), bool)

    def bytes(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> tuple:
        first = addresses.astype(np.int64)
        if ((first < 0) | (first + size > self.data.shape[1]) | (first % size != 0)).any():
            raise Fault(f"local memory out of bounds or misaligned: {size} bytes at {first.max()}")
        return lanes[:, None], first[:, None] + np.arange(size)

    def load(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        at = self.bytes(lanes, addresses, size)
        if not self.written[at].all():
            raise Fault("reads local memory that was not written")
        return self.data[at]

    def store(self, lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        at = self.bytes(lanes, addresses, values.shape[1])
        self.data[at], self.written[at] = values, True


@dataclasses.dataclass
class _Copy:
    lanes: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    sources: np.ndarray
    full: np.ndarray
    """Which lanes copy; the others write zeros."""
    size: int


class AsyncCopies:
    """The cp.async of some programs, carried out as they are waited for: groups are counted for
    each lane."""

    def __init__(self, lanes: int, memory: GlobalMemory, shared: SharedMemory):
        self.memory, self.shared = memory, shared
        self.groups = np.zeros(lanes, np.int64)
        self.pending: list[_Copy] = []

    def start(self, lanes, places, sources, full, size, stamps) -> None:
        self.shared.begin(places, size, stamps)
        # The addresses must be valid now, the values are what is there later.
        some = slice(None) if full.all() else full
        self.memory.check_load(sources[some], size, stamps[some])
        self.pending.append(_Copy(lanes, self.groups[lanes], places, sources, full, size))

    def commit(self, lanes) -> None:
        self.groups[lanes] += 1

    def wait(self, lanes, keep: int, stamps_of_all: np.ndarray) -> None:
        """Completes all but the last `keep` groups of these lanes."""
        limit = np.full(self.groups.size, -1)
        limit[lanes] = self.groups[lanes] - keep
        left = []
        for copy in self.pending:
            now = copy.groups < limit[copy.lanes]
            if now.any():
                part = copy if now.all() else self._split(copy, now)
                stamps = stamps_of_all[part.lanes]
                self.shared.land(part.places, self._values(part, stamps), stamps)
            if not now.all():
                left.append(self._split(copy, ~now) if now.any() else copy)
        self.pending = left

    def _values(self, copy: _Copy, stamps: np.ndarray) -> np.ndarray:
        full = copy.full
        if full.all():
            return self.memory.load(copy.sources, copy.size, stamps)
        values = np.zeros((full.size, copy.size), np.uint8)
        values[full] = self.memory.load(copy.sources[full], copy.size, stamps[full])
        return values

    def _split(self, copy: _Copy, which: np.ndarray) -> _Copy:
        fields = ("lanes", "groups", "places", "sources", "full")
        return dataclasses.replace(copy, **{f: getattr(copy, f)[which] for f in fields})


def _rows(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes as [n, size], a view."""
    return data[: data.size // size * size].reshape(-1, size)


WORDS = {size: np.dtype(kind) for size, kind in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"))}
WORDS[16] = np.dtype("c16")
"""Size → what is copied at once; of the last, only its bits are meant."""


def taken(data: np.ndarray, first: np.ndarray, size: int) -> np.ndarray:
    """uint8[lanes, size] from these first bytes of `data`, which are multiples of `size`."""
    if data.ctypes.data % min(size, 8):
        return _rows(data, size)[first // size]
    words = data[: data.size // size * size].view(WORDS[size])
    return words[first // size].view(np.uint8).reshape(-1, size)
