"""What happens when: compute in its order, beside queues that move bytes, on one clock.

The device computes one thing after the other. Beside it queues (the link, a disk) carry out chunks
in their own order, and workers (a decoder, CPU cores) do what they are given. A layer waits for the
parts that it needs: gate and up before their products, down before its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from host_offload.queue.transfer import DEMAND, Load, QueueError, Transfer, TransferChunk
from host_offload.queue.virtual import VirtualQueue

DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class TimelineEvent:
    """Something that took time on a track, simulated or measured. Times are seconds."""

    track: str
    name: str
    begin: float
    end: float
    layer: int | None = None
    """Whose it is; None: no layer's, or not known."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A queue's server: bytes per second, seconds of latency, the most of a chunk.

    beside: seconds that the device loses by each byte that begins to move while it computes, where
    both share cores or memory. Raises QueueError where that is all of the time.
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


class Need(NamedTuple):
    """An expert whose bytes may still travel, and the seconds of its products."""

    ticket: int
    gate_up: float
    down: float


class Timeline:
    """Servers on one clock. links: queues by name. record: whether `events` are kept. Raises
    QueueError as VirtualQueue."""

    def __init__(self, links: Mapping[str, Link], *, record: bool = True):
        self.now = 0.0
        """Seconds, the device's."""
        self.events: list[TimelineEvent] = []
        """What happened, by track in the order of its beginning."""
        self._record = record
        self._lost = 0.0
        """Seconds that all chunks which began have taken from the device if it computed."""
        self._beside = {name: link.beside for name, link in links.items()}
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

    def there(self, queue: str, ticket: int, part: int | None = None) -> bool:
        """Whether a part of a transfer, or the whole, needs no more waiting."""
        return self._queues[queue].there(ticket, part)

    def compute(self, name: str, seconds: float, layer: int | None = None) -> None:
        """The device computes for so long, and longer by what is moved meanwhile, while the others
        go on."""
        began, left = self.now, seconds
        while left > 0:
            lost = self._lost
            self._until(self.now + left)
            left = self._lost - lost
        self._happened(DEVICE, name, began, self.now, layer)

    def wait(
        self, queue: str, ticket: int, part: int | None = None, layer: int | None = None
    ) -> None:
        """The device waits for a part of a transfer, or for the whole."""
        carried, began = self._queues[queue], self.now
        carried.wait(ticket, part)
        self._until(carried.now)
        self._happened(DEVICE, "wait", began, self.now, layer)

    def give(self, worker: str, name: str, seconds: float) -> float:
        """A worker begins something now, or when it is free; returns when that will end."""
        begin = max(self.now, self._free.get(worker, 0.0))
        self._free[worker] = begin + seconds
        self._happened(worker, name, begin, begin + seconds)
        return begin + seconds

    def wait_until(self, when: float) -> None:
        """The device waits for a time, of `give`, that may have passed."""
        began = self.now
        self._until(max(when, self.now))
        self._happened(DEVICE, "wait", began, self.now)

    def layer(self, number: int, cost: LayerCost, queue: str, needs: Sequence[Need]) -> None:
        """A layer of which these experts may not be there yet. cost: of the others."""
        self.compute(f"layer {number}", cost.before, number)
        self.experts(number, cost, queue, needs)

    def experts(
        self,
        number: int,
        cost: LayerCost,
        queue: str,
        needs: Iterable[Need],
        through: Iterable[Need] = (),
        buffers: int = 2,
    ) -> None:
        """The same from behind the router on, as the op expert_ffn does it: what is needed is a
        demand from then on; what is there is computed first, then what has come meanwhile, or what
        was queued first as its parts come.

        through: experts without a cell, each queued when it is taken; `buffers` of them fly, or are
        computed, at a time."""
        flying, through = sorted(needs), iter(through)
        for need in flying:
            self._demand(queue, need.ticket)
        passing = list(itertools.islice(through, buffers))
        flying += passing
        self.compute(f"layer {number} gate and up", cost.gate_up, number)
        self.compute(f"layer {number} down", cost.down, number)
        while flying:
            come = [need for need in flying if self.there(queue, need.ticket)] or flying[:1]
            self._products(number, queue, come)
            flying = [need for need in flying if need not in come]
            freed = sum(need in passing for need in come)
            more = list(itertools.islice(through, freed))
            flying, passing = flying + more, passing + more
        self.compute(f"layer {number} after", cost.after, number)

    def forget(self, queue: str) -> None:
        """Drops what is known of transfers that have settled: their tickets are no more."""
        for settled in self._queues[queue].observe().settled:
            del self._transfers[queue, settled.ticket]

    def _products(self, number: int, queue: str, needs: Sequence[Need]) -> None:
        """Gate and up of all, then down. All parts of a transfer but the last are those that gate
        and up need."""
        parts = [self._transfers[queue, need.ticket][1] for need in needs]
        for need, count in zip(needs, parts, strict=True):
            for part in range(max(count - 1, 1)):
                self.wait(queue, need.ticket, part, number)
            self.compute(f"layer {number} gate and up", need.gate_up, number)
        for need, count in zip(needs, parts, strict=True):
            self.wait(queue, need.ticket, count - 1, number)
            self.compute(f"layer {number} down", need.down, number)

    def _demand(self, queue: str, ticket: int) -> None:
        transfer, parts = self._transfers[queue, ticket]
        if not transfer.demand:
            self._queues[queue].reorder(ticket, DEMAND, 0)
            self._transfers[queue, ticket] = dataclasses.replace(transfer, cause=DEMAND), parts

    def _until(self, when: float) -> None:
        self.now = when
        for queue in self._queues.values():
            queue.advance(max(when, queue.now))

    def _happened(
        self, track: str, name: str, begin: float, end: float, layer: int | None = None
    ) -> None:
        if self._record and end > begin:
            self.events.append(TimelineEvent(track, name, begin, end, layer))

    def _log(self, name: str) -> Callable[[TransferChunk, float, float], None]:
        def log(chunk: TransferChunk, begin: float, end: float) -> None:
            self._lost += self._beside[name] * chunk.bytes
            t, _ = self._transfers[name, chunk.ticket]
            said = f"{t.cause} {t.layer}.{t.expert} part {chunk.part}"
            self._happened(name, said, begin, end, t.layer)

        return log


def trace_events(events: Iterable[TimelineEvent]) -> dict[str, Any]:
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
            **({} if event.layer is None else {"args": {"layer": event.layer}}),
        }
        for event in events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}


def write_trace(path: Path, events: Iterable[TimelineEvent]) -> None:
    """Writes a file that https://ui.perfetto.dev opens. Raises OSError."""
    path.write_text(json.dumps(trace_events(events)))
