"""What happens when: compute in its order, beside queues that move bytes, on one clock.

The device computes one thing after the other. Beside it queues (the link, a disk) carry out chunks
in their own order, and workers (a decoder, CPU cores) do what they are given. A layer waits for the
parts that it needs: gate and up before their products, down before its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.queue.transfer import Chunk, Load, Transfer
from host_offload.queue.virtual import VirtualQueue

DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that took time on a track, simulated or measured. Times are seconds."""

    track: str
    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Link:
    """A queue's server: bytes per second, seconds of latency, the most of a chunk."""

    rate: float
    latency: float = 0.0
    chunk_bytes: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Seconds of the device for the parts of a layer. before: attention and routing. gate_up,
    down: the experts' products. after: what follows them."""

    before: float
    gate_up: float
    down: float
    after: float = 0.0

    @property
    def total(self) -> float:
        return self.before + self.gate_up + self.down + self.after


class Timeline:
    """Servers on one clock. links: queues by name. Raises QueueError as VirtualQueue."""

    def __init__(self, links: Mapping[str, Link]):
        self.now = 0.0
        """Seconds, the device's."""
        self.events: list[Event] = []
        """What happened, by track in the order of its beginning."""
        self._transfers: dict[tuple[str, int], tuple[Transfer, int]] = {}
        """(queue, ticket) → the transfer and the number of its parts."""
        self._free: dict[str, float] = {}
        """Worker → when it ends what it was given."""
        self._queues = {
            name: VirtualQueue(
                link.rate, link.latency, chunk_bytes=link.chunk_bytes, log=self._log(name)
            )
            for name, link in links.items()
        }

    def __getitem__(self, name: str) -> VirtualQueue:
        """A queue, to cancel, reorder and observe."""
        return self._queues[name]

    def submit(self, queue: str, transfer: Transfer, parts: tuple[int, ...]) -> int:
        """Queues a transfer now; its ticket. Raises QueueError as VirtualQueue.submit."""
        ticket = self._queues[queue].submit(transfer, Load(parts))
        self._transfers[queue, ticket] = transfer, len(parts)
        return ticket

    def compute(self, name: str, seconds: float) -> None:
        """The device computes for so long, while the others go on."""
        self._until(self.now + seconds, name)

    def wait(self, queue: str, ticket: int, part: int | None = None) -> None:
        """The device waits for a part of a transfer, or for the whole."""
        carried = self._queues[queue]
        carried.wait(ticket, part)
        self._until(carried.now, "wait")

    def give(self, worker: str, name: str, seconds: float) -> float:
        """A worker begins something now, or when it is free; returns when that will end."""
        begin = max(self.now, self._free.get(worker, 0.0))
        self._free[worker] = begin + seconds
        self.events.append(Event(worker, name, begin, begin + seconds))
        return begin + seconds

    def wait_until(self, when: float) -> None:
        """The device waits for a time, of `give`, that may have passed."""
        self._until(max(when, self.now), "wait")

    def layer(self, number: int, cost: LayerCost, queue: str, needs: Sequence[int]) -> None:
        """A layer of which these tickets' experts are not there yet. Their parts but the last are
        those that gate and up need."""
        self.compute(f"layer {number}", cost.before)
        self.experts(number, cost, queue, needs)

    def experts(self, number: int, cost: LayerCost, queue: str, needs: Sequence[int]) -> None:
        """The same from behind the router on, where demands are known."""
        for ticket in needs:
            for part in range(self._transfers[queue, ticket][1] - 1):
                self.wait(queue, ticket, part)
        self.compute(f"layer {number} gate and up", cost.gate_up)
        for ticket in needs:
            self.wait(queue, ticket)
        self.compute(f"layer {number} down", cost.down)
        self.compute(f"layer {number} after", cost.after)

    def _until(self, when: float, name: str) -> None:
        if when > self.now:
            self.events.append(Event(DEVICE, name, self.now, when))
        self.now = when
        for queue in self._queues.values():
            queue.advance(max(when, queue.now))

    def _log(self, name: str) -> Callable[[Chunk, float, float], None]:
        def log(chunk: Chunk, begin: float, end: float) -> None:
            t, _ = self._transfers[name, chunk.ticket]
            said = f"{t.cause} {t.layer}.{t.expert} part {chunk.part}"
            self.events.append(Event(name, said, begin, end))

        return log


def trace_events(events: Iterable[Event]) -> dict[str, Any]:
    """The events as an object for Perfetto and chrome://tracing (Trace Event Format, complete
    events): a thread a track, in the order in which the tracks begin."""
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
        }
        for event in events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Writes a file that https://ui.perfetto.dev opens. Raises OSError."""
    path.write_text(json.dumps(trace_events(events)))
