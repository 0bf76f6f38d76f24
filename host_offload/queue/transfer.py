"""What is queued, what it is made of, and what can be seen of it: plain frozen values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

DEMAND = "demand"
"""The cause of transfers that a running step waits for. Every other cause is ahead of need."""

CHUNK_BYTES = 1 << 20
"""Bytes that are moved at once, and so what a demand waits for at most. Smaller chunks slow the
compute beside them by 15 to 25% (docs/explanation/transfers.md)."""


@dataclasses.dataclass(frozen=True)
class QueueSpec:
    """The queue that a run wants beside its compute."""

    rate: float = 0.0
    """Bytes per second of the link, at most; 0: as fast as it goes."""
    latency: float = 0.0
    """Seconds from a chunk's end on the link until its bytes count as there."""
    threads: int = 2
    chunk_bytes: int = CHUNK_BYTES
    buffers: int = 2
    """Records without a cell that are on their way at once."""

    def of_chunks(self, chunk_bytes: int) -> QueueSpec:
        """The same with chunks of another size."""
        return dataclasses.replace(self, chunk_bytes=chunk_bytes)


State = Literal["done", "failed", "cancelled"]
"""How a transfer ended."""


class QueueError(ValueError):
    """The queue refuses what it was asked for; the message says why."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An expert's move into a cell. Equal fields may be queued again once the first has settled."""

    layer: int
    expert: int
    version: int
    cell: int
    """A number that names the cell among all of its arena, whatever the layer."""
    cause: str = DEMAND
    priority: int = 0
    """Among transfers of the same kind, demands or others, the lowest goes first."""

    @property
    def demand(self) -> bool:
        return self.cause == DEMAND


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the bytes are: `address` in this process's memory, or `path` and `offset` of a file.

    checksum: what the bytes must have, as 16 hex digits of SHA-256 (those of moejax.json) or
    8 of CRC-32C; "" checks nothing but that the file is the one that it was.
    """

    address: int = 0
    path: str = ""
    offset: int = 0
    checksum: str = ""


@dataclasses.dataclass(frozen=True)
class Load:
    """The bytes of a transfer: those of each part (gate, up, down), one after the other in the
    source and from `destination`, an address, on. entry: the address of an int32 that becomes
    `value` after the last byte is there and checked, 0: none."""

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
    """One piece of a transfer, of one of its parts."""

    ticket: int
    part: int
    first: int
    """Bytes of the transfer before it."""
    bytes: int


def chunks_of(ticket: int, parts: tuple[int, ...], chunk_bytes: int) -> Iterator[TransferChunk]:
    """The chunks of a transfer in their order: none has bytes of two parts."""
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
    """What happened to a failed one, with the file's name; else empty."""


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
    """What a policy may see of a queue, and a trace records."""

    busy_seconds: float
    """Time with a chunk under way since the queue was made."""
    flying: tuple[Flying, ...]
    """By ticket."""
    settled: tuple[Settled, ...]
    """In the order in which they settled, each seen by one observation."""

    @property
    def bytes_left(self) -> int:
        return sum(flying.bytes_left for flying in self.flying)
