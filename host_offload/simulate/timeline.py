"""A timeline of a device that computes in order, with a link that moves bytes and a second
processor beside it, on one clock. The device waits for an expert's bytes in two parts: gate and up
before their products, down before its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from host_offload.queue.transfer import DEMAND, QueueError, Transfer, TransferChunk
from host_offload.queue.virtual import VirtualQueue

DEVICE = "device"
LINK = "link"
CPU = "cpu"
"""The track of the second processor."""

GATE_UP = 2 / 3
"""Share of an expert's products, and bytes, that gate and up have. They come first."""


@dataclasses.dataclass(frozen=True)
class TimelineEvent:
    """Something that took time on a track, simulated or measured. Times are seconds."""

    track: str
    name: str
    begin: float
    end: float
    layer: int | None = None
    """The layer of the event; None: no layer's, or unknown."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A queue's server: bytes per second, seconds of latency, largest chunk.

    - `beside`: seconds that the device loses by each byte that begins to move while it computes, if
      both share cores or memory.

    Raises QueueError if that is all of the device's time.
    """

    rate: float
    latency: float = 0.0
    chunk_bytes: int = 1 << 20
    beside: float = 0.0

    def __post_init__(self):
        if not 0 <= self.rate * self.beside < 1:
            raise QueueError(
                f"a link of {self.rate} bytes/s that costs the device {self.beside} s a byte "
                "leaves no time to compute"
            )


class Need(NamedTuple):
    """An expert whose bytes may still travel, and the seconds of its products."""

    ticket: int
    seconds: float


class Timeline:
    """Servers on one clock.

    - `link`: None: no link.
    - `record`: whether `events` are kept.

    Raises QueueError like VirtualQueue.
    """

    def __init__(self, link: Link | None, *, record: bool = True):
        self.now = 0.0
        """Seconds on the device's clock."""
        self.events: list[TimelineEvent] = []
        """Past events, by track in the order of their beginning."""
        self._record = record
        self._link = link or Link(1.0)
        self._lost = 0.0
        """Seconds that all begun chunks would have taken from a computing device."""
        self._queue = VirtualQueue(
            self._link.rate,
            self._link.latency,
            chunk_bytes=self._link.chunk_bytes,
            log=self._log_chunk,
        )
        self._transfers: dict[int, Transfer] = {}
        """Transfers by ticket."""

    # ---- the link

    def submit(self, transfer: Transfer, nbytes: int) -> int:
        """Queues a transfer now and returns its ticket. Raises QueueError like
        VirtualQueue.submit."""
        gate_up = nbytes // 3 * 2
        ticket = self._queue.submit(transfer, (gate_up, nbytes - gate_up))
        self._transfers[ticket] = transfer
        return ticket

    def cancel(self, ticket: int) -> bool:
        """Cancels a transfer that has not begun. Returns whether it could."""
        return self._queue.cancel(ticket)

    def urge(self, ticket: int) -> None:
        """Makes a transfer a demand."""
        transfer = self._transfers[ticket]
        if not transfer.demand:
            self._queue.reorder(ticket, DEMAND, 0)
            self._transfers[ticket] = dataclasses.replace(transfer, cause=DEMAND)

    def is_there(self, ticket: int) -> bool:
        """Whether a transfer needs no more waiting."""
        return self._queue.there(ticket)

    def drop_settled(self) -> None:
        """Drops all data on settled transfers. Their tickets become invalid."""
        for settled in self._queue.observe().settled:
            del self._transfers[settled.ticket]

    # ---- the device

    def compute(self, name: str, seconds: float, layer: int | None = None) -> None:
        """Computes on the device for so many seconds, and longer by what moves meanwhile. The link
        and the second processor continue."""
        began, left = self.now, seconds
        while left > 0:
            lost = self._lost
            self._advance(self.now + left)
            left = self._lost - lost
        self.add_event(DEVICE, name, began, self.now, layer)

    def wait(self, ticket: int, part: int | None = None, layer: int | None = None) -> None:
        """Makes the device wait for a part of a transfer, or for all of it."""
        self._queue.wait(ticket, part)
        self.wait_until(self._queue.now, layer)

    def wait_until(self, when: float, layer: int | None = None) -> None:
        """Makes the device wait until a time, which may have passed."""
        began = self.now
        self._advance(max(when, self.now))
        self.add_event(DEVICE, "wait", began, self.now, layer)

    def compute_experts(self, layer: int, seconds: float, needs: Iterable[Need]) -> None:
        """Computes the products of a layer's experts like the op expert_ffn. Needed transfers
        become demands. Experts that are there (`seconds`) are computed first, then those that have
        come meanwhile, then the earliest queued as its parts come."""
        left = sorted(needs)
        for need in left:
            self.urge(need.ticket)
        self._compute_products(layer, [Need(-1, seconds)])
        while left:
            come = [need for need in left if self.is_there(need.ticket)] or left[:1]
            self._compute_products(layer, come)
            left = [need for need in left if need not in come]

    def _compute_products(self, layer: int, needs: Sequence[Need]) -> None:
        """Computes gate and up of all experts, then down. Nothing waits for ticket −1."""
        parts = (0, "gate and up", GATE_UP), (None, "down", 1 - GATE_UP)
        for part, name, share in parts:
            for ticket, seconds in needs:
                if ticket >= 0:
                    self.wait(ticket, part, layer)
                self.compute(f"layer {layer} {name}", seconds * share, layer)

    # ---- the clock

    def add_event(
        self, track: str, name: str, begin: float, end: float, layer: int | None = None
    ) -> None:
        if self._record and end > begin:
            self.events.append(TimelineEvent(track, name, begin, end, layer))

    def _advance(self, when: float) -> None:
        self.now = when
        self._queue.advance(max(when, self._queue.now))

    def _log_chunk(self, chunk: TransferChunk, begin: float, end: float) -> None:
        self._lost += self._link.beside * chunk.bytes
        moved = self._transfers[chunk.ticket]
        name = f"{moved.cause} {moved.layer}.{moved.expert} part {chunk.part}"
        self.add_event(LINK, name, begin, end, moved.layer)


def trace_events(events: Iterable[TimelineEvent]) -> dict[str, Any]:
    """Returns the events as an object for Perfetto and chrome://tracing (Trace Event Format,
    complete events): one thread for each track, in the order in which the tracks begin."""
    events = sorted(events, key=lambda event: event.begin)
    tracks = {track: i for i, track in enumerate(dict.fromkeys(e.track for e in events))}
    names = [
        {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": track}}
        for track, i in tracks.items()
    ]
    spans = [
        {
            "ph": "X",
            "pid": 1,
            "tid": tracks[event.track],
            "name": event.name,
            "ts": event.begin * 1e6,
            "dur": (event.end - event.begin) * 1e6,
            **({} if event.layer is None else {"args": {"layer": event.layer}}),
        }
        for event in events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}


def write_trace(path: Path, events: Iterable[TimelineEvent]) -> None:
    """Writes a file that https://ui.perfetto.dev opens. Raises OSError."""
    path.write_text(json.dumps(trace_events(events)))
