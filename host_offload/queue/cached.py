"""A cache of pinned arrays between records in files and the device.

DeviceQueue copies pinned arrays. For experts in files, the cache makes them when a transfer asks
for a record. It keeps as many records as its bytes hold, and evicts the least recently used one. A
transfer *holds* its record from the moment the record gets room until the copy to the device has
ended; held records are not evicted. Threads of the cache read, so the host only waits for records
that it needs now.

Transfers ahead of need may hold only so many records that demands find room (`least_records`).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence

import jax
import numpy as np

from host_offload.memory.bounded_reads import Reads
from host_offload.memory.record_source import RecordSource
from host_offload.memory.store import aligned_empty
from host_offload.queue.pinned import InPieces, piece_edges

_Key = tuple[int, int]
"""MoE layer, expert."""

_LOOK_SECONDS = 2e-3
"""Most seconds of a wait without a read: copies that have ended meanwhile make room."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Settings of a cache."""

    bytes: int
    """Most bytes of pinned arrays. Each thread has one more record beside them while it reads."""
    threads: int = 4
    """Threads that read and verify; also the most records that are held ahead of need."""
    chunk_bytes: int | None = None
    """Most bytes of a piece, see piece_edges."""


def share_cache(spec: CacheSpec, sources: Sequence[int]) -> list[CacheSpec]:
    """Divides a cache among sources, by the bytes of all their records."""
    every = sum(sources)
    return [dataclasses.replace(spec, bytes=spec.bytes * each // every) for each in sources]


@dataclasses.dataclass(frozen=True)
class CacheTotals:
    """Counters of a cache since it was made."""

    hits: int
    """Transfers whose record was there, or was being read for another transfer."""
    misses: int
    """Transfers whose record had to be read."""
    bytes_read: int
    """Bytes read from files."""
    bytes_held: int
    """Bytes of pinned arrays, including records that are being read."""


@dataclasses.dataclass(eq=False)
class _Record:
    """A record that has room in the cache."""

    key: _Key
    pieces: list[jax.Array] | None = None
    """None until it is read."""
    failure: Exception | None = None
    reading: bool = False
    """Whether a thread reads it now."""
    held: list[Asked] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Asked:
    """A record that a transfer asked for. Release it when the transfer needs it no more."""

    cache: CachedRecords
    key: _Key
    demand: bool
    priority: int
    number: int
    record: _Record | None = None
    """None while there is no room."""

    def there(self) -> bool:
        """Whether the record was read, or reading it failed."""
        record = self.record
        return record is not None and (record.pieces is not None or record.failure is not None)

    def pieces(self) -> list[jax.Array]:
        """Returns the pinned arrays in the order of their rows. Raises OSError, naming the file, if
        it could not be read, and any error of making the arrays."""
        assert self.record is not None
        if self.record.failure is not None:
            raise self.record.failure
        assert self.record.pieces is not None
        return self.record.pieces

    def urge(self, demand: bool, priority: int) -> None:
        """Changes the record's urgency: demands are read first, then the lowest priority value."""
        with self.cache.lock:
            self.demand, self.priority = demand, priority
            self.cache.give_room()

    def wait(self) -> None:
        """Waits until the record is there, at most _LOOK_SECONDS without any read."""
        with self.cache.lock:
            if not self.there():
                self.cache.lock.wait(_LOOK_SECONDS)

    def release(self) -> None:
        """Gives up the record. Idempotent."""
        with self.cache.lock:
            if self.cache.asked.pop(self.number, None) is None:
                return
            if (record := self.record) is not None:
                record.held.remove(self)
                unread = record.pieces is None and record.failure is None
                if unread and not record.held and not record.reading:
                    self.cache.forget(record)
            self.cache.give_room()

    @property
    def rank(self) -> tuple[bool, int, int]:
        return (not self.demand, self.priority, self.number)


class CachedRecords(InPieces):
    """Every expert of one version, in files and, as many as fit, in `pinned_host` memory of
    one device. It has the methods of PinnedRecords that DeviceQueue calls. Only one thread may
    call it."""

    def __init__(self, source: RecordSource, device: jax.Device, spec: CacheSpec):
        layout = source.format
        self.source, self.spec = source, spec
        self.shape = *source.shape, layout.rows, layout.hidden
        self.edges = piece_edges(layout, spec.chunk_bytes)
        self.capacity = spec.bytes // layout.nbytes
        """Most records in the cache."""
        self._sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self.lock = threading.Condition()
        self._records: dict[_Key, _Record] = {}
        """Records with room, the most recently used one last."""
        self.asked: dict[int, Asked] = {}
        """Records that were asked for and not released, by number."""
        self._numbers = itertools.count()
        self._hits = self._misses = self._bytes_read = 0
        self._reads = Reads()
        self._pool = self._reads.new_pool(spec.threads)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that records take now."""
        return len(self._records) * sum(self.sizes)

    def totals(self) -> CacheTotals:
        with self.lock:
            return CacheTotals(self._hits, self._misses, self._bytes_read, self.nbytes)

    # ---- what transfers ask for

    def ask(self, layer: int, expert: int, *, demand: bool, priority: int) -> Asked:
        """Asks for a record, which is read once there is room and it is the most urgent."""
        with self.lock:
            asked = Asked(self, (layer, expert), demand, priority, next(self._numbers))
            self.asked[asked.number] = asked
            self.give_room()
        return asked

    def delete(self) -> None:
        """Gives up reads under way, and drops all records. Idempotent."""
        self._reads.give_up()
        self._pool.shutdown()
        with self.lock:
            self._records.clear()
            self.asked.clear()

    # ---- room, with the lock held

    def give_room(self) -> None:
        """Gives room to records that were asked for, the most urgent first."""
        asked = self.asked.values()
        ahead = sum(each.record is not None and not each.demand for each in asked)
        for each in sorted((each for each in asked if each.record is None), key=lambda a: a.rank):
            if not each.demand and ahead >= self.spec.threads:
                return
            record = self._records.get(each.key)
            if record is None:
                if not self._has_room():
                    return
                record = _Record(each.key)
                self._misses += 1
                self._pool.submit(self._read_next)
            else:
                self._hits += 1
                del self._records[each.key]
            self._records[each.key] = record  # now the most recently used
            record.held.append(each)
            each.record = record
            ahead += not each.demand

    def _has_room(self) -> bool:
        """Makes room for one more record, by dropping the least recently used one that is not held.
        Returns whether there is room."""
        if len(self._records) < self.capacity:
            return True
        idle = (r for r in self._records.values() if r.pieces is not None and not r.held)
        if (oldest := next(idle, None)) is None:
            return False
        self.forget(oldest)
        return True

    def forget(self, record: _Record) -> None:
        # The arrays are not deleted: the device may share this memory.
        del self._records[record.key]

    # ---- reading, by threads

    def _read_next(self) -> None:
        """Reads the most urgent unread record that has room."""
        with self.lock:
            waiting = [
                (min(asked.rank for asked in record.held), record)
                for record in self._records.values()
                if record.pieces is None and not record.reading and record.held
            ]
            if not waiting:
                return  # it was given up
            record = min(waiting, key=lambda found: found[0])[1]
            record.reading = True
        failure, pieces = None, None
        try:
            read = aligned_empty(self.shape[2:], self.dtype)
            self.source.read(*record.key, read)
            pieces = self._pinned(read)
        except Exception as error:  # any error fails the transfers that hold the record
            failure = error
        with self.lock:
            record.reading = False
            record.pieces, record.failure = pieces, failure
            if failure is not None:
                self.forget(record)
            else:
                self._bytes_read += sum(self.sizes)
            self.give_room()
            self.lock.notify_all()

    def _pinned(self, record: np.ndarray) -> list[jax.Array]:
        parts = [record[a:b] for a, b in itertools.pairwise(self.edges)]
        return jax.block_until_ready(jax.device_put(parts, self._sharding))


def least_records(demands: int, spec: CacheSpec) -> int:
    """Returns how many records a cache must hold, so that so many demands can be under way beside
    records held ahead of need."""
    return demands + spec.threads
