"""The native queue of transfers: its rates and costs, and what it and compute do to each other.

python -m scripts.cpu queue [DIR] [--rounds 9] [--size 256MiB] [--link-rate 2e9] [--trace FILE]

Rates from memory, and with DIR from a file there (random bytes, written once and read past the page
cache where the filesystem allows it); what a transfer of an empty queue costs, and an op's question
about a cell that nobody writes; how long a demand waits behind prefetches until the link is its own
(at most one chunk, and what it takes to wake a thread), and until its bytes are there; the `linear`
op on a layer of 64 MiB alone and beside a copy of --link-rate that goes on (paired, alternating;
its weights lie in pages of 4 KiB, with which it reads at half the rate of an engine's; see
`scripts.transfers overlap` for steps of an engine beside a copy); a layer
computed beside a transfer that takes as long (over the step's border: it is awaited after the next
one was submitted), beside the two in series. Medians of --rounds. Seconds are the clock's, which
other programs disturb; ratios are of neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.queue.native import NativeQueue, checksum
from host_offload.queue.transfer import CHUNK_BYTES, DEMAND, Load, Source, Transfer
from host_offload.simulate.timeline import DEVICE, Event, write_trace
from moejax import UserError
from moejax.device import select_device
from moejax.sizes import parse_size
from pallas_kernels.linear.api import linear
from scripts.parts.commands import new_parser, refusing
from scripts.parts.text_table import show

WIDTH, ROWS, LAYERS = 2048, 16384, 4
EXPERT = 12 << 20
"""Bytes of one transfer where rates are measured: an OLMoE expert's, about."""

DEMANDS = 4
"""A round, behind prefetches of a share of the cells each."""


@refusing(ValueError, OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="where a file is, or is written")
    parser.add_argument("--rounds", type=int, default=9, help="of each figure (default: 9)")
    parser.add_argument("--size", default="256MiB", help="to copy or read at once (256MiB)")
    parser.add_argument("--link-rate", type=float, default=2e9, help="bytes/s (default: 2e9)")
    parser.add_argument("--threads", type=int, default=2, help="of the queue (default: 2)")
    parser.add_argument("--trace", type=Path, help="writes the steps ahead for Perfetto there")
    parser.add_argument("--json", action="store_true", help="one JSON object instead")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or not args.link_rate > 0 or args.threads < 1:
        raise UserError("--rounds and --threads must be at least 1, --link-rate positive")
    found = dict(figures(args, parse_size(args.size)))
    found["load"] = os.getloadavg()[0]
    show(args.json, [found], (f"{name:52} {value:12,.4g}" for name, value in found.items()))
    return 0


def figures(args: argparse.Namespace, size: int) -> Iterator[tuple[str, float]]:
    """(what, value) of each figure."""
    select_device("cpu")
    store, cells = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    memory = Source(address=store.ctypes.data)
    yield from rates("memory", memory, cells, args)
    if args.directory:
        source = Source(path=str(random_file(args.directory, size)))
        yield from rates("file", source, cells, args)
    yield from checksum_rates(store[:EXPERT].tobytes())
    yield from costs(memory, cells, args)
    yield from demand_waits(memory, cells, args)
    compute = layer_compute()
    yield from beside_a_copy(compute, memory, cells, args)
    yield from overlap(compute, memory, cells, args)


def random_file(directory: Path, size: int) -> Path:
    """A file of so many bytes that no filesystem compresses; written unless it is there."""
    path = directory / f"queue-{size}.bin"
    if not path.exists() or path.stat().st_size != size:
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:
            for first in range(0, size, 1 << 24):
                file.write(rng.bytes(min(1 << 24, size - first)))
            os.fsync(file.fileno())
    return path


def submit_all(queue: NativeQueue, source: Source, cells: np.ndarray) -> list[int]:
    """Tickets of transfers of EXPERT bytes from the whole of a source."""
    tickets = []
    for cell, first in enumerate(range(0, cells.size - EXPERT + 1, EXPERT)):
        place = Source(source.address + first if source.address else 0, source.path, first)
        load = Load((EXPERT // 3,) * 3, place, cells.ctypes.data + first)
        tickets.append(queue.submit(Transfer(0, cell, 0, cell, "prefetch"), load))
    return tickets


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def wait_all(queue: NativeQueue, tickets: Sequence[int]) -> None:
    for ticket in tickets:
        settled = queue.wait(ticket)
        if settled is None or settled.state != "done":
            raise UserError(f"a transfer failed: {settled}")
    queue.observe()


def rates(
    name: str, source: Source, cells: np.ndarray, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """GB/s of the queue beside a plain copy, or a plain read of the same file."""
    ours, plain, alone = [], [], np.empty_like(cells)
    with NativeQueue(threads=args.threads) as queue:
        for _ in range(args.rounds):
            tickets: list[int] = []

            def whole(tickets: list[int] = tickets) -> None:
                tickets += submit_all(queue, source, cells)
                wait_all(queue, tickets)

            seconds = timed(whole)
            ours.append(len(tickets) * EXPERT / seconds / 1e9)
            if source.address:
                plain.append(cells.size / timed(lambda: np.copyto(alone, cells)) / 1e9)
        yield f"{name}: GB/s", statistics.median(ours)
        if source.path:
            yield "file: past the page cache", queue.reads_past_the_cache(source.path)
    if plain:
        ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
        yield f"{name}: of one thread's plain copy", ratio


def checksum_rates(data: bytes) -> Iterator[tuple[str, float]]:
    for kind in ("sha256", "crc32c"):
        began = time.process_time()
        for _ in range(8):
            checksum(kind, data)
        seconds = time.process_time() - began
        yield f"{kind}: GB per processor second", 8 * len(data) / seconds / 1e9


def costs(
    source: Source, cells: np.ndarray, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Microseconds of what costs even where little is moved."""
    load = Load((64,), source, cells.ctypes.data)
    with NativeQueue(threads=args.threads) as queue:

        def one() -> None:
            queue.wait(queue.submit(Transfer(0, 0, 0, 0), load))

        for name, work in (
            ("a transfer of 64 bytes, submitted and awaited", one),
            ("a question about a cell that nobody writes", lambda: queue.wait_cell(0)),
            ("an observation of an empty queue", queue.observe),
        ):
            times = [timed(lambda work=work: [work() for _ in range(200)]) / 200]
            queue.observe()
            times += [timed(lambda work=work: [work() for _ in range(200)]) / 200]
            queue.observe()
            yield f"{name}, µs", min(times) * 1e6


def demand_waits(
    source: Source, cells: np.ndarray, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """How long a demand of one chunk waits behind prefetches until the link is its own, in chunks'
    times of the link, how many chunks of others begin meanwhile, and what all of it takes."""
    chunk_seconds, rng = CHUNK_BYTES / args.link_rate, np.random.default_rng(0)
    room = cells.size // 2
    load = Load((CHUNK_BYTES,), source, cells.ctypes.data + room)
    waits, between, whole = [], [], []
    with NativeQueue(threads=args.threads, rate=args.link_rate) as queue:
        queue.record()
        for _ in range(args.rounds * DEMANDS):
            tickets = submit_all(queue, source, cells[: room // DEMANDS])
            time.sleep(rng.uniform(2, 6) * chunk_seconds)
            demand = queue.submit(Transfer(0, 0, 0, -1, DEMAND), load)
            came = time.monotonic()
            queue.wait(demand)
            whole.append(time.monotonic() - came)
            wait_all(queue, tickets)
            spans = queue.spans()
            begin = next(span.begin for span in spans if span.ticket == demand)
            waits.append(begin - came)
            between.append(sum(came < s.begin < begin for s in spans))
    for name, seconds in (
        ("a demand behind prefetches: begins after, chunks", waits),
        ("a demand of a chunk behind prefetches, chunks", whole),
    ):
        yield name, statistics.median(seconds) / chunk_seconds
        yield f"{name.partition(',')[0]}, longest", max(seconds) / chunk_seconds
    yield "chunks of others that begin before it, most", max(between)


def layer_compute() -> Callable[[int], None]:
    """Runs the op `linear` for one row on one of LAYERS layers of 64 MiB."""
    weights = jnp.ones((LAYERS, ROWS, WIDTH), jnp.bfloat16)
    x = jnp.ones((1, WIDTH), jnp.bfloat16)
    run = jax.jit(lambda x, w, layer: linear(x, w, layer, implementation="cpu"))

    def compute(layer: int) -> None:
        run(x, weights, layer % LAYERS).block_until_ready()

    compute(0)
    return compute


def beside_a_copy(
    compute: Callable[[int], None], source: Source, cells: np.ndarray, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """A layer's time beside a copy of the link's rate that goes on, over its time alone."""
    alone, ratios, copied = [], [], []
    with NativeQueue(threads=args.threads, rate=args.link_rate) as queue:
        for _ in range(args.rounds):
            first = timed(lambda: [compute(layer) for layer in range(8)])
            tickets = submit_all(queue, source, cells)
            before = queue.observe().bytes_left
            second = timed(lambda: [compute(layer) for layer in range(8)])
            left = queue.observe().bytes_left
            for ticket in tickets:
                queue.cancel(ticket)
            while queue.observe().flying:
                time.sleep(0.001)
            if left == 0:
                raise UserError("the copy ended before the layers; give a larger --size")
            third = timed(lambda: [compute(layer) for layer in range(8)])
            alone.append(min(first, third))
            ratios.append(second / ((first + third) / 2))
            copied.append((before - left) / second / 1e9)
    yield "8 layers of 64 MiB alone, ms", statistics.median(alone) * 1e3
    yield "the same beside a copy, of that", statistics.median(ratios)
    yield "that copy, GB/s", statistics.median(copied)


def overlap(
    compute: Callable[[int], None], source: Source, cells: np.ndarray, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Steps of 8 layers and a transfer of as long on the link: ahead by a step, and in series."""
    seconds = statistics.median(timed(lambda: [compute(i) for i in range(8)]) for _ in range(5))
    size = min(int(seconds * args.link_rate) // CHUNK_BYTES * CHUNK_BYTES, cells.size // 2)
    size = max(size, CHUNK_BYTES)
    places = itertools.cycle((0, 1))
    ahead, series = [], []
    events: list[Event] = []
    with NativeQueue(threads=args.threads, rate=args.link_rate) as queue:
        queue.record()

        def submit() -> int:
            place = next(places)
            load = Load((size,), source, cells.ctypes.data + place * size)
            return queue.submit(Transfer(0, place, 0, place, "prefetch"), load)

        def seen(layer: int) -> None:
            began = time.monotonic()
            compute(layer)
            events.append(Event(DEVICE, f"layer {layer}", began, time.monotonic()))

        def serial() -> None:
            queue.wait(submit())
            for layer in range(8):
                compute(layer)

        for _ in range(args.rounds):
            tickets = [submit()]

            def steps(tickets: list[int] = tickets) -> None:
                for _ in range(4):
                    tickets.append(submit())
                    for layer in range(8):
                        seen(layer)
                    queue.wait(tickets[-2])

            ahead.append(timed(steps) / 4)
            queue.wait(tickets[-1])
            events += [
                Event("link", f"ticket {s.ticket}, {s.first >> 20} MiB", s.begin, s.end)
                for s in queue.spans()
            ]
            series.append(timed(lambda: [serial() for _ in range(4)]) / 4)
            queue.observe()
            queue.spans()
    if args.trace:
        write_trace(args.trace, events)
    link = size / args.link_rate
    yield "overlap: the link's ms a step", link * 1e3
    yield "overlap: a step ahead, ms", statistics.median(ahead) * 1e3
    yield "overlap: in series, ms", statistics.median(series) * 1e3
    ratios: list[Any] = [a / b for a, b in zip(ahead, series, strict=True)]
    yield "overlap: ahead over series (0.5 is perfect)", statistics.median(ratios)
