"""The types of the transfer queue: transfers, their bytes and chunks, and their progress."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

DEMAND = "demand"
"""The cause of transfers that a running step waits for. Every other cause is ahead of need."""

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk, the most that a demand waits for. Smaller chunks slow the compute beside them
by 15 to 25% (docs/explanation/transfers.md)."""


@dataclasses.dataclass(frozen=True)
class QueueSpec:
    """Settings of a queue beside compute."""

    rate: float = 0.0
    """Most bytes per second of the link; 0: no limit."""
    latency: float = 0.0
    """Seconds from a chunk's end on the link until its bytes count as there."""
    threads: int = 2
    chunk_bytes: int = CHUNK_BYTES
    buffers: int = 2
    """Most records without a cell that are on their way at once."""

    def of_chunks(self, chunk_bytes: int) -> QueueSpec:
        """Returns the same settings with another chunk size."""
        return dataclasses.replace(self, chunk_bytes=chunk_bytes)


State = Literal["done", "failed", "cancelled"]
"""How a transfer ended."""


class QueueError(ValueError):
    """Raised if the queue refuses a request; the message says why."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An expert's move into a cell. Equal fields may be queued again once the first has settled."""

    layer: int
    expert: int
    version: int
    cell: int
    """A number that is unique among the cells of all layers."""
    cause: str = DEMAND
    priority: int = 0
    """The lowest value goes first, among demands and among the other transfers."""

    @property
    def demand(self) -> bool:
        return self.cause == DEMAND


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of a transfer's bytes: `address` in this process's memory, or `path` and `offset`
    of a file.

    - `checksum`: of the bytes, as 16 hex digits of SHA-256 (those of moejax.json) or 8 of CRC-32C;
      "" checks only that the file has not changed.
    """

    address: int = 0
    path: str = ""
    offset: int = 0
    checksum: str = ""


@dataclasses.dataclass(frozen=True)
class Load:
    """The bytes of a transfer. Its parts (gate, up, down) are contiguous in the source and at the
    destination.

    - `parts`: bytes of each part.
    - `destination`: address of the first byte.
    - `entry`: address of an int32 that becomes `value` once all bytes are there and checked; 0:
      none.
    """

    parts: tuple[int, ...]
    source: Source = Source()
    destination: int = 0
    entry: int = 0
    value: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.parts)


@dataclasses.dataclass(frozen=True)
class TransferChunk:
    """A piece of one part of a transfer."""

    ticket: int
    part: int
    first: int
    """Bytes of the transfer before the chunk."""
    bytes: int


def chunks_of(ticket: int, parts: tuple[int, ...], chunk_bytes: int) -> Iterator[TransferChunk]:
    """Yields the chunks of a transfer in order. No chunk has bytes of two parts."""
    for part, (first, size) in enumerate(
        zip(itertools.accumulate(parts, initial=0), parts, strict=False)
    ):
        for at in range(0, size, chunk_bytes):
            yield TransferChunk(ticket, part, first + at, min(chunk_bytes, size - at))


@dataclasses.dataclass(frozen=True)
class Settled:
    """How a transfer ended."""

    ticket: int
    transfer: Transfer
    state: State
    message: str = ""
    """The failure, with the file's name; empty unless failed."""


@dataclasses.dataclass(frozen=True)
class Flying:
    """A transfer that has not settled."""

    ticket: int
    transfer: Transfer
    bytes: int
    bytes_left: int
    begun: bool


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a queue as policies and traces see it."""

    busy_seconds: float
    """Time with a chunk under way since the queue was made."""
    flying: tuple[Flying, ...]
    """By ticket."""
    settled: tuple[Settled, ...]
    """In the order in which they settled. Each is in one observation only."""

    @property
    def bytes_left(self) -> int:
        return sum(flying.bytes_left for flying in self.flying)
