"""The queue without threads, bytes or clock: it chooses the next chunk and books its end.

Demands come first, then transfers of the lowest priority value, then the oldest. The choice is made
for each chunk, so a demand pauses other transfers at their next chunk. A transfer that has begun
runs to its end; one that has not begun can be cancelled.

A cell has one writer. A second transfer into a cell is refused until the first has settled. It does
not wait instead: its caller would choose another cell, or not want the record any more, and an op
that needs the record would wait for two transfers.

After a failed chunk its transfer begins no more chunks. The transfer fails, and its cell is free,
once its other chunks under way have ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

from host_offload.queue.transfer import (
    CHUNK_BYTES,
    Flying,
    Progress,
    QueueError,
    Settled,
    Transfer,
    TransferChunk,
    chunks_of,
)


@dataclasses.dataclass
class _Open:
    """A transfer that has not settled."""

    transfer: Transfer
    waiting: deque[TransferChunk]
    left: list[int]
    """Bytes of each part that are not there."""
    bytes: int
    begun: bool = False
    under_way: int = 0
    """Chunks under way."""
    failure: str = ""


class TransferQueue:
    """Orders chunks of transfers and books their ends.

    - `chunk_bytes`: most bytes of a chunk.
    - `clock`: returns seconds, for the time with a chunk under way.

    Raises QueueError unless chunks have bytes.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, clock: Callable[[], float] = time.monotonic):
        if chunk_bytes < 1:
            raise QueueError(f"chunks of {chunk_bytes} bytes")
        self._chunk_bytes, self._clock = chunk_bytes, clock
        self._busy, self._busy_since = 0.0, 0.0
        self._open: dict[int, _Open] = {}
        self._cells: dict[int, int] = {}
        """Ticket of the transfer that writes a cell, by cell."""
        self._tickets = 0
        self._settled: dict[int, Settled] = {}
        """Transfers that settled since the last observation, by ticket."""
        self.under_way = 0
        """Chunks that have begun and not ended."""

    def submit(self, transfer: Transfer, parts: tuple[int, ...]) -> int:
        """Queues a transfer.

        - `parts`: bytes of each part.

        Returns its ticket: 1, 2, … in the order of submission. Raises QueueError if a transfer into
        the cell has not settled, or if a part has no bytes.
        """
        if not parts or min(parts) < 1:
            raise QueueError(f"a transfer needs bytes in each part, not {parts}")
        if transfer.cell in self._cells:
            raise QueueError(
                f"cell {transfer.cell} has a transfer under way, ticket "
                f"{self._cells[transfer.cell]}; wait for it, or cancel it"
            )
        self._tickets += 1
        ticket = self._cells[transfer.cell] = self._tickets
        chunks = deque(chunks_of(ticket, parts, self._chunk_bytes))
        self._open[ticket] = _Open(transfer, chunks, list(parts), sum(parts))
        return ticket

    def next_chunk(self) -> TransferChunk | None:
        """Begins the next chunk and returns it; None if no chunk waits."""
        tickets = self.in_turn()
        return self.begin_chunk(tickets[0]) if tickets else None

    def begin_chunk(self, ticket: int) -> TransferChunk | None:
        """Begins a transfer's next chunk and returns it; None if all have begun."""
        open_ = self._open[ticket]
        if not open_.waiting:
            return None
        if not self.under_way:
            self._busy_since = self._clock()
        open_.begun = True
        open_.under_way += 1
        self.under_way += 1
        return open_.waiting.popleft()

    def in_turn(self, ready: Callable[[int], bool] | None = None) -> list[int]:
        """Returns the tickets with waiting chunks, in the order of their turn.

        - `ready`: whether chunks of a ticket can begin; None: all can.
        """
        waiting = [
            (not open_.transfer.demand, open_.transfer.priority, ticket)
            for ticket, open_ in self._open.items()
            if open_.waiting and (ready is None or ready(ticket))
        ]
        return [ticket for _, _, ticket in sorted(waiting)]

    def end(self, chunk: TransferChunk, failure: str = "") -> Settled | None:
        """Books the end of a chunk.

        - `failure`: what went wrong; empty: its bytes are there.

        Returns how its transfer ended, if this was the transfer's last chunk; else None.
        """
        open_ = self._open[chunk.ticket]
        open_.under_way -= 1
        self.under_way -= 1
        if not self.under_way:
            self._busy += self._clock() - self._busy_since
        if failure:
            open_.failure = open_.failure or failure
            open_.waiting.clear()
        else:
            open_.left[chunk.part] -= chunk.bytes
        if open_.waiting or open_.under_way:
            return None
        state = "failed" if open_.failure else "done"
        return self._settle(Settled(chunk.ticket, open_.transfer, state, open_.failure))

    def cancel(self, ticket: int) -> bool:
        """Cancels a transfer that has not begun. Returns False if it has begun or settled."""
        open_ = self._open.get(ticket)
        if open_ is None or open_.begun:
            return False
        self._settle(Settled(ticket, open_.transfer, "cancelled"))
        return True

    def reorder(self, ticket: int, cause: str, priority: int) -> bool:
        """Gives a transfer another cause and priority, for its chunks that have not begun. Returns
        False if it has settled."""
        open_ = self._open.get(ticket)
        if open_ is None:
            return False
        open_.transfer = dataclasses.replace(open_.transfer, cause=cause, priority=priority)
        return True

    @property
    def waiting(self) -> bool:
        """Whether a chunk waits to begin."""
        return any(open_.waiting for open_ in self._open.values())

    def there(self, ticket: int, part: int | None = None) -> bool:
        """Whether a part, or all parts (None), are there, or the transfer has settled. Raises
        QueueError for an unknown ticket or one whose end was observed, and for a part that the
        transfer does not have."""
        if self.settled(ticket):
            return True
        left = self._open[ticket].left
        if part is None:
            return False
        if not 0 <= part < len(left):
            raise QueueError(f"ticket {ticket} has {len(left)} parts, no part {part}")
        return not left[part]

    def settled(self, ticket: int) -> Settled | None:
        """Returns how a transfer ended; None if it has not. Raises QueueError as `there` does."""
        if ticket not in self._open and ticket not in self._settled:
            raise QueueError(f"there is no ticket {ticket}, or its end was observed")
        return self._settled.get(ticket)

    def cancel_all(self) -> None:
        """Cancels all transfers that have not begun."""
        for ticket in list(self._open):
            self.cancel(ticket)

    def open(self) -> tuple[Flying, ...]:
        """Returns the transfers that have not settled, by ticket."""
        return tuple(
            Flying(ticket, open_.transfer, open_.bytes, sum(open_.left), open_.begun)
            for ticket, open_ in self._open.items()
        )

    @property
    def busy_seconds(self) -> float:
        """Seconds with a chunk under way so far."""
        return self._busy + (self._clock() - self._busy_since if self.under_way else 0.0)

    def observe(self) -> Progress:
        """Returns the transfers under way, and those that settled since the last observation."""
        settled = tuple(self._settled.values())
        self._settled.clear()
        return Progress(self.busy_seconds, self.open(), settled)

    def _settle(self, settled: Settled) -> Settled:
        del self._open[settled.ticket]
        del self._cells[settled.transfer.cell]
        self._settled[settled.ticket] = settled
        return settled
