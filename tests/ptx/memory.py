"""Global, shared and local memory, and the asynchronous copies between the first two."""

from __future__ import annotations

import dataclasses
import math
import mmap

import numpy as np

from tests.ptx.parse import Fault
from tests.ptx.tracker import FLAG, Tracker

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
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1))
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
    that the kernel may write."""

    def __init__(self, buffers: list[Buffer], granule: int, threads: int, alignment: int):
        self.buffers = buffers
        self.alignment = alignment
        self.trackers = [
            Tracker(b.data.size // granule + 1, granule, threads, shared=False)
            if b.writable
            else None
            for b in buffers
        ]

    def address(self, number: int) -> int:
        """Of the first byte of a buffer: no better aligned than XLA promises."""
        return ((number + 1) << REGION) + self.alignment

    def load(self, addresses: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """uint8[lanes, size]."""
        out = np.empty((addresses.size, size), np.uint8)
        for number, lanes, first in self._places(addresses, size, "reads"):
            data, tracker = self.buffers[number].data, self.trackers[number]
            out[lanes] = _rows(data, size)[first // size]
            if tracker is not None:
                wrong = tracker.read(tracker.cells(first, size), stamps[lanes])
                self._check(number, first, size, wrong)
        return out

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

    def _places(self, addresses: np.ndarray, size: int, verb: str):
        """(buffer, lanes, first bytes) for each buffer that these addresses are in."""
        signed = addresses.astype(np.int64)
        regions = (signed >> REGION) - 1
        for number in np.unique(regions):
            lanes = np.flatnonzero(regions == number)
            if not 0 <= number < len(self.buffers):
                raise Fault(f"{verb} address {signed[lanes[0]]:#x}, where no buffer is")
            buffer = self.buffers[number]
            if len(lanes) == signed.size:
                lanes = slice(None)
            first = signed[lanes] - self.address(int(number))
            bad = (first < 0) | (first + size > buffer.data.size)
            if bad.any():
                raise Fault(
                    f"{verb} {size} bytes at byte {first[bad][0]} of {buffer.name}, out of bounds: "
                    f"it has {buffer.data.size} ({bad.sum()} lanes)"
                )
            if (bad := signed[lanes] % size != 0).any():
                raise Fault(
                    f"{verb} {size} bytes misaligned at byte {first[bad][0]} of {buffer.name}"
                )
            if (bad := first % size != 0).any():
                raise Fault(f"the interpreter needs buffers aligned to {size}: {buffer.name}")
            yield int(number), lanes, first

    def _check(self, number: int, first: np.ndarray, size: int, wrong: tuple) -> None:
        what, bad = wrong
        if bad.any():
            raise Fault(
                f"{what}: {size} bytes at byte {first[bad][0]} of {self.buffers[number].name}"
            )


TWO_VALUES = "several threads write different values at once (race)"


class SharedMemory:
    """Shared memory of some programs, one after the other."""

    def __init__(self, programs: int, size: int, granule: int, threads: int):
        self.size = size
        self.stride = -(-size // 128) * 128
        self.data = np.zeros(programs * self.stride, np.uint8)
        self.tracker = Tracker(self.data.size // granule, granule, threads, shared=True)

    def places(self, addresses: np.ndarray, size: int, programs: np.ndarray, verb: str):
        """First bytes of accesses of `size` bytes in `data`."""
        first = addresses.astype(np.int64)
        if (bad := (first < 0) | (first + size > self.size)).any():
            raise Fault(
                f"{verb} {size} bytes at byte {first[bad][0]} of shared memory, out of bounds: "
                f"it has {self.size}"
            )
        if (bad := first % size != 0).any():
            raise Fault(f"{verb} {size} bytes misaligned at byte {first[bad][0]} of shared memory")
        return first + programs.astype(np.int64) * self.stride

    def load(self, places: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        self._check(places, self.tracker.read(self.tracker.cells(places, size), stamps))
        return _rows(self.data, size)[places // size]

    def store(self, places: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        size = values.shape[1]
        rows = _rows(self.data, size)
        same = (rows[places // size] == values).all(1)
        cells = self.tracker.cells(places, size)
        self._check(places, self.tracker.write(cells, stamps, same))
        rows[places // size] = values
        self._check(places, (TWO_VALUES, (rows[places // size] != values).any(1)))

    def begin(self, places: np.ndarray, size: int, stamps: np.ndarray) -> None:
        """An asynchronous copy to these places is under way."""
        cells = self.tracker.cells(places, size)
        self._check(places, self.tracker.write(cells, stamps, flag=FLAG))

    def land(self, places: np.ndarray, values: np.ndarray | None, stamps: np.ndarray, size: int):
        """It is complete; values: None if they were written before."""
        self.tracker.land(self.tracker.cells(places, size), stamps)
        if values is not None:
            self.put(places, values)

    def put(self, places: np.ndarray, values: np.ndarray) -> None:
        _rows(self.data, values.shape[1])[places // values.shape[1]] = values

    def _check(self, places: np.ndarray, wrong: tuple) -> None:
        what, bad = wrong
        if bad.any():
            place = places[bad][0]
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


MODES = ("late", "early", "random")
"""When asynchronous copies are carried out: as they are waited for, at once, or either."""


@dataclasses.dataclass
class _Copy:
    lanes: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    sources: np.ndarray
    full: np.ndarray
    """Which lanes copy; the others write zeros."""
    size: int
    done: bool
    """The bytes are there already."""


class AsyncCopies:
    """The cp.async of some programs: groups are counted for each lane."""

    def __init__(self, lanes: int, memory: GlobalMemory, shared: SharedMemory, mode: str, rng):
        self.memory, self.shared, self.mode, self.rng = memory, shared, mode, rng
        self.groups = np.zeros(lanes, np.int64)
        self.pending: list[_Copy] = []

    def start(self, lanes, places, sources, full, size, stamps) -> None:
        self.shared.begin(places, size, stamps)
        early = self.mode == "early" or (self.mode == "random" and self.rng.random() < 0.5)
        copy = _Copy(lanes, self.groups[lanes], places, sources, full, size, early)
        if early:
            self.shared.put(places, self._values(copy, stamps))
        else:  # the addresses must be valid now, the values are what is there later
            self.memory.load(sources[full], size, stamps[full])
        self.pending.append(copy)

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
                values = None if part.done else self._values(part, stamps)
                self.shared.land(part.places, values, stamps, part.size)
            if not now.all():
                left.append(self._split(copy, ~now) if now.any() else copy)
        self.pending = left

    def _values(self, copy: _Copy, stamps: np.ndarray) -> np.ndarray:
        values = np.zeros((copy.places.size, copy.size), np.uint8)
        full = copy.full
        values[full] = self.memory.load(copy.sources[full], copy.size, stamps[full])
        return values

    def _split(self, copy: _Copy, which: np.ndarray) -> _Copy:
        fields = ("lanes", "groups", "places", "sources", "full")
        return dataclasses.replace(copy, **{f: getattr(copy, f)[which] for f in fields})


def _rows(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes as [n, size], a view."""
    return data[: data.size // size * size].reshape(-1, size)
