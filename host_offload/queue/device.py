"""The queue whose chunks jax copies: whole pinned arrays, to the device, beside its programs.

A chunk is a piece of a record (pinned.PinnedRecords). It begins with a `jax.device_put` into memory
of its own, *staging*, and is there when that array is ready. A record in a file
(cached.CachedRecords) is read from `submit` on, and its chunks begin after that. The caller owns
the arena, and moves a record from staging into a cell by a program of its own (`take`).

No thread copies. Chunks begin when the caller calls `begin`, in the order of order.TransferQueue.
On a GPU the moment of that call decides which programs run beside the copies. PJRT gives a buffer
memory that is free once all programs enqueued before have run (`kComputeSynchronized`,
xla/pjrt/local_device_state.h in openxla/xla). So a copy waits for those programs, and runs beside
programs that are enqueued after it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from host_offload.queue.cached import Asked, CachedRecords
from host_offload.queue.native import Totals
from host_offload.queue.order import TransferQueue
from host_offload.queue.pinned import Given, PinnedRecords
from host_offload.queue.transfer import (
    DEMAND,
    Progress,
    QueueError,
    Settled,
    Transfer,
    TransferChunk,
)

Put = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
"""Begins to copy arrays to the device. An error that it raises fails their transfer."""

_SECONDS = ("wait_seconds", "busy_seconds")

_FAILURES = (jax.errors.JaxRuntimeError, MemoryError, OSError)
"""Errors of a copy that fail only its transfer."""


class TransferLost(Exception):
    """Raised if a record did not come; the message says why."""


@dataclasses.dataclass
class _Staged:
    """A record that is queued, on its way, or there and not yet taken."""

    transfer: Transfer
    demand: bool
    """Whether it was queued as a demand; `transfer` has its present cause."""
    asked: Given | Asked
    """The record in the store, held until the copy has ended."""
    arrays: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    """The staged copy of each chunk, by the chunk's first byte."""
    chunks: list[TransferChunk] = dataclasses.field(default_factory=list)
    """Chunks that have begun and are not known to have ended."""
    mark: jax.Array | None = None
    """For a record that was taken before it had come: ready once the record was read."""
    settled: Settled | None = None


class DeviceQueue:
    """A queue with the methods of NativeQueue, over stores of separate pinned arrays. Only one
    thread may call it.

    State `done` means that the record is in staging, where it stays until `take` or `drop`.

    - `records`: the stores, by version number.
    - `places`: by version number, each layer's index in its store (ExpertStore.places).
    - `ahead`: most chunks of prefetches under way at once, for which a later demand waits.
    - `put`: begins copies (default: jax.device_put to the device).

    Raises QueueError for numbers out of range.
    """

    def __init__(
        self,
        records: Sequence[PinnedRecords | CachedRecords],
        device: jax.Device,
        *,
        ahead: int = 2,
        put: Put | None = None,
        places: Sequence[Sequence[int] | None] | None = None,
    ):
        if ahead < 1:
            raise QueueError(f"{ahead} chunks ahead of need at once")
        self.records, self._ahead = tuple(records), ahead
        self._places = [
            range(held.shape[0]) if layers is None else layers
            for held, layers in zip(records, places or [None] * len(records), strict=True)
        ]
        sharding = jax.sharding.SingleDeviceSharding(device)
        # One call for all pieces, since it takes the host as long as a call for one.
        self.put: Put = put or (lambda arrays: jax.device_put([*arrays], sharding))
        # Chunks are as large as the largest piece, so that each piece is one chunk.
        self._queue = TransferQueue(max(size for held in records for size in held.sizes))
        self._staged: dict[int, _Staged] = {}
        self._watcher = ThreadPoolExecutor(1, "moejax-waits")
        self._waited: float | None = None
        self.last_mark: jax.Array | None = None
        """Ready once the records that were taken last have been read."""
        self._closed = False
        names = {field.name for field in dataclasses.fields(Totals)}
        self._counts = dict.fromkeys(names - {"flying", "bytes_left", *_SECONDS}, 0)

    # ---- as NativeQueue

    def submit(self, transfer: Transfer) -> int:
        """Queues a transfer, without beginning it. If an earlier record of the cell was taken
        before it had come, this waits for that record instead of refusing. Returns the ticket."""
        return self.submit_all([transfer])[0]

    def submit_all(self, transfers: Sequence[Transfer]) -> list[int]:
        """Queues several transfers as `submit` does, and looks for ended chunks only once."""
        if self._closed:
            raise QueueError("the queue is closed")
        cells = {transfer.cell for transfer in transfers}
        places = [self._place(transfer) for transfer in transfers]
        for staged in self._staged.values():
            if staged.transfer.cell in cells:
                _wait_for(staged.mark)
        self._look()
        tickets = []
        for transfer, place in zip(transfers, places, strict=True):
            records = self.records[transfer.version]
            ticket = self._queue.submit(transfer, records.sizes)
            asked = records.ask(
                place, transfer.expert, demand=transfer.demand, priority=transfer.priority
            )
            self._staged[ticket] = _Staged(transfer, transfer.demand, asked)
            tickets.append(ticket)
        return tickets

    def _place(self, transfer: Transfer) -> int:
        """The index of a transfer's layer in its store. Raises QueueError if the store has no such
        expert."""
        places = self._places[transfer.version]
        place = places[transfer.layer] if 0 <= transfer.layer < len(places) else -1
        if place < 0 or not 0 <= transfer.expert < self.records[transfer.version].shape[1]:
            raise QueueError(f"there is no expert {transfer.expert} of layer {transfer.layer}")
        return place

    def submit_again(self, transfer: Transfer) -> int:
        """Queues, as `submit` does, a record that did not come ahead of need and is needed now."""
        self._counts["retried"] += 1
        return self.submit(transfer)

    def cancel(self, ticket: int) -> bool:
        if not self._queue.cancel(ticket):
            return False
        self._staged.pop(ticket).asked.release()
        self._counts["cancelled"] += 1
        return True

    def reorder(self, ticket: int, cause: str, priority: int) -> bool:
        if not self._queue.reorder(ticket, cause, priority):
            return False
        staged = self._staged[ticket]
        staged.transfer = dataclasses.replace(staged.transfer, cause=cause, priority=priority)
        staged.asked.urge(staged.transfer.demand, priority)
        return True

    def wait(self, ticket: int, part: int | None = None) -> Settled | None:
        """Waits as NativeQueue.wait does. It begins the chunks that must come first."""
        while not self._queue.there(ticket, part):
            self.begin()
            if not self._staged[ticket].asked.there():
                self._staged[ticket].asked.wait()
                continue
            under_way = [staged for staged in self._staged.values() if staged.chunks]
            if not under_way or self._queue.there(ticket, part):
                continue  # all that had begun has ended meanwhile
            first = under_way[0]
            _wait_for(first.mark if first.mark is not None else first.arrays[first.chunks[0].first])
            self._look()
        return self._queue.settled(ticket)

    def observe(self) -> Progress:
        """Observes as NativeQueue.observe does. Busy seconds are as exact as the times at which the
        queue was looked at."""
        self._look()
        return self._queue.observe()

    def close(self) -> None:
        """Cancels transfers that have not begun, waits for the others, and drops all staged
        records. Idempotent."""
        self._closed = True
        self._watcher.shutdown()
        self._queue.cancel_all()
        for staged in self._staged.values():
            for array in (*staged.arrays.values(), staged.mark):
                _wait_for(array)
            staged.asked.release()
        self._staged.clear()

    # ---- what only this backend has

    def begin(self, *, others: bool = True) -> None:
        """Begins chunks of records that were read: all of demands, and as many of prefetches as may
        be under way. Call it before dispatching the programs that the copies should run beside.

        - `others`: False begins demands only.
        """
        self._look()
        ahead = sum(len(s.chunks) for s in self._staged.values() if not s.transfer.demand)
        due: dict[int, list[TransferChunk]] = {}
        for ticket in self._queue.in_turn(self._read):
            demand = self._staged[ticket].transfer.demand
            if not demand and not others:
                break
            while (demand or ahead < self._ahead) and (chunk := self._queue.begin_chunk(ticket)):
                ahead += not demand
                due.setdefault(ticket, []).append(chunk)
        for ticket, chunks in due.items():
            self._begin(ticket, chunks)

    def version(self, ticket: int) -> int:
        """Returns the version number of a record that was not taken."""
        return self._staged[ticket].transfer.version

    def arrived(self) -> list[int]:
        """Returns the tickets of records that are there and were not taken, oldest first."""
        self._look()
        return [t for t, s in self._staged.items() if s.settled and s.settled.state == "done"]

    def failed(self, ticket: int) -> bool:
        """Whether the transfer of a record that was not taken has failed."""
        self._look()
        settled = self._staged[ticket].settled
        return settled is not None and settled.state == "failed"

    def take(self, ticket: int, move: Callable[[Sequence[jax.Array]], jax.Array]) -> None:
        """Hands a record over, whether it is there or still comes. Chunks that have not begun begin
        now, before all others, once the record is read.

        - `move`: takes the record's pieces in the order of their rows, dispatches the program that
          reads them, and returns an array that is ready once they were read.

        The pieces' memory is freed once there are no references to them. Raises TransferLost if a
        read or a copy failed.
        """
        try:
            self.take_all([ticket], lambda records: move(records[0]))
        except TransferLost:
            del self._staged[ticket]
            raise

    def take_all(
        self, tickets: Sequence[int], move: Callable[[Sequence[Sequence[jax.Array]]], jax.Array]
    ) -> None:
        """Hands several records over to one program, as `take` does. Raises TransferLost, and takes
        nothing, if one of them failed."""
        for ticket in tickets:
            staged = self._staged[ticket]
            if staged.settled is None:
                self._hasten(ticket, staged)
            if staged.settled is not None and staged.settled.state == "failed":
                raise TransferLost(staged.settled.message)
        taken = [self._staged[ticket] for ticket in tickets]
        mark = move([[s.arrays[first] for first in sorted(s.arrays)] for s in taken])
        self.last_mark = mark
        for ticket, staged in zip(tickets, taken, strict=True):
            if staged.settled is None:
                staged.mark = mark
                staged.arrays.clear()
            else:
                del self._staged[ticket]

    def drop(self, ticket: int) -> None:
        """Frees a record that is no longer wanted. It cancels a transfer that has not begun, and
        otherwise waits for it."""
        if not self._staged[ticket].settled and self.cancel(ticket):
            return
        if not self._staged[ticket].settled:
            self.wait(ticket)
        self._staged.pop(ticket, None)

    def watch(self, before: jax.Array, after: jax.Array) -> None:
        """Counts the time between `before` and `after` becoming ready as a wait. A thread waits for
        them, so that the caller runs ahead of the device; neither may be donated."""
        self._watcher.submit(self._count_wait, before, after)

    def totals(self) -> Totals:
        """Returns the counters so far. wait_seconds is the time counted by `watch`; None if it was
        never called."""
        self._look()
        flying = self._queue.open()
        return Totals(
            **self._counts,
            flying=len(flying),
            bytes_left=sum(each.bytes_left for each in flying),
            wait_seconds=self._waited,
            busy_seconds=self._queue.busy_seconds,
        )

    # ---- parts

    def _count_wait(self, before: jax.Array, after: jax.Array) -> None:
        _wait_for(before)
        began = time.monotonic()
        _wait_for(after)
        self._waited = (self._waited or 0.0) + time.monotonic() - began

    def _read(self, ticket: int) -> bool:
        """Whether a transfer's chunks can begin."""
        return self._staged[ticket].asked.there()

    def _hasten(self, ticket: int, staged: _Staged) -> None:
        """Begins all chunks of a record that is taken, as demands. Returns once all have begun, or
        the transfer has failed."""
        self.reorder(ticket, DEMAND, 0)
        self._counts["waits"] += 1
        self._counts["late"] += not staged.demand
        pieces = len(self.records[staged.transfer.version].sizes)
        if len(staged.arrays) == pieces:
            return
        self.begin(others=False)
        while not staged.asked.there():
            staged.asked.wait()
            self.begin(others=False)
        if len(staged.arrays) < pieces:
            self.wait(ticket)  # a chunk failed while others of the record are under way

    def _begin(self, ticket: int, chunks: Sequence[TransferChunk]) -> None:
        """Begins to copy chunks of one transfer, which the queue has begun."""
        staged = self._staged[ticket]
        try:
            pieces = staged.asked.pieces()
            arrays = self.put([pieces[chunk.part] for chunk in chunks])
        except _FAILURES as error:
            for chunk in chunks:
                self._end(chunk, f"{type(error).__name__}: {error}")
            return
        staged.chunks += chunks
        staged.arrays.update(zip((c.first for c in chunks), arrays, strict=True))

    def _look(self) -> None:
        """Books the chunks that have ended."""
        for staged in [s for s in self._staged.values() if s.chunks]:
            for chunk in [*staged.chunks]:
                # The pieces of a taken record are gone; its mark is ready once they were read.
                array = staged.arrays[chunk.first] if staged.mark is None else staged.mark
                if array.is_ready():  # pyright: ignore[reportAttributeAccessIssue]  not in jax's stubs
                    staged.chunks.remove(chunk)
                    self._end(chunk, _wait_for(array))

    def _end(self, chunk: TransferChunk, failure: str) -> None:
        settled = self._queue.end(chunk, failure)
        if settled is None:
            return
        staged = self._staged[chunk.ticket]
        staged.settled = settled
        staged.asked.release()
        if settled.state == "failed":
            self._counts["failed"] += 1
            staged.arrays.clear()
        else:
            which = "demand" if staged.demand else "ahead"
            self._counts[f"{which}_bytes"] += sum(self.records[staged.transfer.version].sizes)
            self._counts["demands" if staged.demand else "ahead"] += 1
        if staged.mark is not None:
            del self._staged[chunk.ticket]


def _wait_for(array: jax.Array | None) -> str:
    """Waits for an array. Returns its failure, "" for none."""
    try:
        jax.block_until_ready(array)
    except _FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""
