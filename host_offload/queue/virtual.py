"""The queue over a clock: one server, a link of some rate and latency, and no bytes.

A chunk holds the link for its bytes at the rate; its bytes count as there the latency later, while
others already travel. The simulator's link, and the oracle of the native queue's order and times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from host_offload.queue.order import TransferQueue
from host_offload.queue.transfer import (
    CHUNK_BYTES,
    Load,
    Progress,
    QueueError,
    Settled,
    Transfer,
    TransferChunk,
)


class VirtualQueue:
    """The calls of NativeQueue, where waiting moves the clock. What is submitted begins
    when the clock moves, so what comes at one time is ordered, or cancelled, before any of it.

    rate: bytes per second. latency: seconds. fails: says of a chunk what goes wrong with it, ""
    for nothing. log: called with (chunk, begin, end) of the link when a chunk begins. Raises
    QueueError for a rate that is not positive or a negative latency.
    """

    def __init__(
        self,
        rate: float,
        latency: float = 0.0,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        fails: Callable[[TransferChunk], str] | None = None,
        log: Callable[[TransferChunk, float, float], None] | None = None,
    ):
        if not rate > 0 or not latency >= 0:
            raise QueueError(f"a link of {rate} bytes/s and {latency} s")
        self.now = 0.0
        """Seconds."""
        self._queue = TransferQueue(chunk_bytes)
        self._rate, self._latency, self._fails, self._log = rate, latency, fails, log
        self._free = 0.0
        """When the link ends what it carries."""
        self._travelling: deque[tuple[float, TransferChunk]] = deque()
        """Chunks that have begun, with the time at which their bytes are there."""
        self._busy, self._busy_since = 0.0, 0.0
        self._closed = False

    # ---- as NativeQueue

    def submit(self, transfer: Transfer, load: Load) -> int:
        if self._closed:
            raise QueueError("the queue is closed")
        return self._queue.submit(transfer, load.parts)

    def cancel(self, ticket: int) -> bool:
        return self._queue.cancel(ticket)

    def reorder(self, ticket: int, cause: str, priority: int) -> bool:
        return self._queue.reorder(ticket, cause, priority)

    def wait(self, ticket: int, part: int | None = None) -> Settled | None:
        while not self._queue.there(ticket, part):
            self._next_event(math.inf)
        return self._queue.settled(ticket)

    def observe(self) -> Progress:
        under_way = self.now - self._busy_since if self._queue.under_way else 0.0
        return self._queue.observe(self._busy + under_way)

    def close(self) -> None:
        self._closed = True
        self._queue.cancel_all()
        while self._next_event(math.inf):
            pass

    def there(self, ticket: int, part: int | None = None) -> bool:
        """As TransferQueue.there, at this time."""
        return self._queue.there(ticket, part)

    # ---- the clock

    def advance(self, until: float) -> None:
        """Moves the clock to a time, and carries out what happens until then. Raises QueueError
        for a time that has passed."""
        if until < self.now:
            raise QueueError(f"the clock is at {self.now} s, after {until}")
        while self._next_event(until):
            pass
        self.now = until

    def _next_event(self, until: float) -> bool:
        """Carries out what happens next, if that is not after `until`: a chunk is there, or the
        link is free and begins one."""
        arrives = self._travelling[0][0] if self._travelling else math.inf
        begins = max(self._free, self.now) if self._queue.waiting else math.inf
        when = min(arrives, begins)
        if when > until or math.isinf(when):
            return False
        self.now = when
        if arrives <= begins:
            _, chunk = self._travelling.popleft()
            self._queue.end(chunk, self._fails(chunk) if self._fails else "")
            if not self._queue.under_way:
                self._busy += self.now - self._busy_since
            return True
        if not self._queue.under_way:
            self._busy_since = self.now
        chunk = self._queue.next_chunk()
        assert chunk is not None
        self._free = self.now + chunk.bytes / self._rate
        self._travelling.append((self._free + self._latency, chunk))
        if self._log:
            self._log(chunk, self.now, self._free)
        return True
