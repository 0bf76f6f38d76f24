"""The queue over a virtual clock: a link with a rate and a latency, and no bytes.

A chunk occupies the link for its bytes divided by the rate. Its bytes count as there one latency
later, while the next chunks already travel. The simulator uses it as its link, and tests compare
the native queue's order and times with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from host_offload.queue.order import TransferQueue
from host_offload.queue.transfer import (
    CHUNK_BYTES,
    QueueError,
    Settled,
    Transfer,
    TransferChunk,
)


class VirtualQueue(TransferQueue):
    """A TransferQueue where a wait moves the clock, in place of NativeQueue's threads. Transfers
    begin only when the clock moves, so those submitted at one time can be reordered or cancelled
    before any of them begins.

    - `rate`: bytes per second.
    - `latency`: seconds.
    - `fails`: returns a chunk's failure, "" for none.
    - `log`: called with (chunk, begin, end) on the link when a chunk begins.

    Raises QueueError for a rate that is not positive or a negative latency.
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
        super().__init__(chunk_bytes, clock=lambda: self.now)
        self.now = 0.0
        """Seconds."""
        self._rate, self._latency, self._fails, self._log = rate, latency, fails, log
        self._free = 0.0
        """Time at which the link is free."""
        self._travelling: deque[tuple[float, TransferChunk]] = deque()
        """(time at which its bytes are there, chunk) of chunks that have begun."""
        self._closed = False

    # ---- as NativeQueue

    def submit(self, transfer: Transfer, parts: tuple[int, ...]) -> int:
        if self._closed:
            raise QueueError("the queue is closed")
        return super().submit(transfer, parts)

    def wait(self, ticket: int, part: int | None = None) -> Settled | None:
        while not self.there(ticket, part):
            self._next_event(math.inf)
        return self.settled(ticket)

    def close(self) -> None:
        self._closed = True
        self.cancel_all()
        while self._next_event(math.inf):
            pass

    # ---- the clock

    def advance(self, until: float) -> None:
        """Moves the clock to a time, and carries out all events until then. Raises QueueError for a
        time that has passed."""
        if until < self.now:
            raise QueueError(f"the clock is at {self.now} s, after {until}")
        while self._next_event(until):
            pass
        self.now = until

    def _next_event(self, until: float) -> bool:
        """Carries out the next event, if it is not after `until`: a chunk arrives, or the link
        begins one. Returns whether there was such an event."""
        arrives = self._travelling[0][0] if self._travelling else math.inf
        begins = max(self._free, self.now) if self.waiting else math.inf
        when = min(arrives, begins)
        if when > until or math.isinf(when):
            return False
        self.now = when
        if arrives <= begins:
            _, chunk = self._travelling.popleft()
            self.end(chunk, self._fails(chunk) if self._fails else "")
            return True
        chunk = self.next_chunk()
        assert chunk is not None
        self._free = self.now + chunk.bytes / self._rate
        self._travelling.append((self._free + self._latency, chunk))
        if self._log:
            self._log(chunk, self.now, self._free)
        return True
