"""Compute and transfers on one clock."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.transfer import DEMAND, QueueError, Transfer
from host_offload.simulate.stream_timeline import StreamedLayer, stream_passes
from host_offload.simulate.timeline import (
    DEVICE,
    LayerCost,
    Link,
    Need,
    Timeline,
    TimelineEvent,
    trace_events,
    write_trace,
)


def transfer(number, cause="prefetch", layer=0):
    return Transfer(layer, number, 0, number, cause)


def test_what_has_no_cell_passes_through_buffers():
    timeline = Timeline({"link": Link(1.0)})
    taken = []

    def through():
        for number in range(4):
            taken.append(timeline.now)
            yield Need(timeline.submit("link", transfer(number, DEMAND), (3,)), 1.0, 1.0)

    hits = LayerCost(before=0.0, gate_up=2.0, down=0.0)
    timeline.experts(0, hits, "link", [], through())
    # There at 3, 6, then each three after the link is free, and two of computing.
    assert taken == [0.0, 0.0, 5.0, 8.0]
    assert timeline.now == pytest.approx(14.0)


def test_the_device_loses_what_moves_beside_it():
    timeline = Timeline({"link": Link(1.0, chunk_bytes=1, beside=0.5)})
    timeline.compute("alone", 4.0)
    assert timeline.now == 4.0
    timeline.submit("link", transfer(0), (100,))
    timeline.compute("beside", 10.0)
    assert timeline.now - 4.0 == pytest.approx(20.0, abs=1.0)
    with pytest.raises(QueueError, match="leaves no time to compute"):
        Link(1.0, beside=1.0)


def test_a_trace_that_perfetto_reads(tmp_path):
    events = [
        TimelineEvent("link", "demand 0.1 part 0", 0.001, 0.002),
        TimelineEvent(DEVICE, "layer 0", 0, 0.001),
    ]
    write_trace(tmp_path / "trace.json", events)
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == trace_events(events)
    names = [e["args"]["name"] for e in read["traceEvents"] if e["ph"] == "M"]
    assert names == [DEVICE, "link"]
    span = [e for e in read["traceEvents"] if e["ph"] == "X"][1]
    assert (span["ts"], span["dur"], span["tid"]) == (1000.0, 1000.0, 1)


# ---- Algorithm 1 on the virtual clock, under random durations

MATRICES = (2, 2, 3)
PASSES = 3

DURATIONS = st.floats(0.01, 4.0)


SEVERAL = st.integers(2, 5)


@st.composite
def plays(draw, layers=SEVERAL):
    """(layers, link, passes) of random durations."""
    count, streamed = draw(layers), draw(st.integers(1, 3))

    def layer() -> StreamedLayer:
        cost = LayerCost(*(draw(DURATIONS) for _ in range(4)))
        return StreamedLayer(cost, [(draw(DURATIONS), draw(DURATIONS)) for _ in range(streamed)])

    link = Link(draw(st.floats(0.5, 20.0)), draw(st.floats(0.0, 1.0)), chunk_bytes=2)
    return count, link, [[layer() for _ in range(count)] for _ in range(PASSES)]


def out_of_order(layers: int, link: Link, passes) -> list[str]:
    """What a played run has against Algorithm 1. count: layers so far, over all passes."""
    timeline = Timeline({"link": link})
    stream_passes(timeline, "link", MATRICES, passes)
    streamed, wrong = len(passes[0][0].streamed), []
    ends, products = [0.0] * layers * PASSES, []
    count, last = -1, -1
    for event in timeline.events:
        if event.track != DEVICE:
            continue
        if event.name == f"layer {event.layer}" and event.layer is not None:
            count += 1
        ends[count] = max(ends[count], event.end)
        products.append((count, event))
        last = max(last, count)
    assert last == layers * PASSES - 1
    loads: dict[int, list] = {}
    seen: dict[int, int] = {}
    for event in timeline.events:
        if event.track == "link":
            number = re.fullmatch(r"\S+ (\d+)\.(\d+) part (\d)", event.name)
            assert number
            layer = int(number[1])
            nth = seen.setdefault(layer, 0)
            loads.setdefault(layer + nth * layers, []).append((int(number[3]), event))
            chunks = sum(-(-n // link.chunk_bytes) for n in MATRICES) * streamed
            if len(loads[layer + nth * layers]) == chunks:
                seen[layer] += 1
    for count, chunks in loads.items():
        for _, event in chunks:
            if count >= 2 and event.begin < ends[count - 2] - 1e-9:
                wrong.append(f"load {count} began while layer {count - 2} computed")
        mine = [event for c, event in products if c == count]
        for name, part in (("gate and up", 1), ("down", 2)):
            # All that a layer computes of these streams here: the n-th needs n parts to be there.
            # Those that were there before it began are computed at once, first.
            begun = [e.begin for e in mine if e.name.endswith(name)][1:]
            here = streamed - len(begun)
            there = sorted(e.end + link.latency for p, e in chunks if p == part)
            per_part = -(-MATRICES[part] // link.chunk_bytes)
            for n, begin in enumerate(begun):
                if begin < there[(here + n + 1) * per_part - 1] - 1e-9:
                    wrong.append(f"{name} of layer {count} before its load")
    return wrong


@given(plays())
def test_no_load_overtakes_a_layer_and_no_layer_its_load(play):
    """Checkable property 1 of shared/papers.md 3.7."""
    assert not out_of_order(*play)


@given(plays(st.just(3)))
def test_a_ring_by_the_layers_parity_collides(play):
    """With three layers the last one and the first one of the next pass have one half."""
    layers, link, passes = play
    original = Timeline.submit

    def submit(self, queue, transfer, parts):
        cell = transfer.layer % 2 * len(passes[0][0].streamed) + transfer.expert
        return original(self, queue, dataclasses.replace(transfer, cell=cell), parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "submit", submit)
        slow = Link(link.rate / 100, link.latency, chunk_bytes=2)
        with pytest.raises(QueueError):
            out_of_order(layers, slow, passes)


def test_a_pass_takes_the_longer_of_computing_and_loading():
    """And no more than a layer beside it."""
    layers, rate = 4, 14.0

    def seconds(product: float) -> list[float]:
        one = StreamedLayer(LayerCost(1.0, 0.0, 0.0), [(product, product)] * 2)
        timeline = Timeline({"link": Link(rate, chunk_bytes=1)})
        return stream_passes(timeline, "link", MATRICES, [[one] * layers] * 4)

    compute, load = 1 + 2 * 2 * 1.0, 2 * sum(MATRICES) / rate
    assert load == 1.0
    assert seconds(1.0)[1:] == pytest.approx([layers * compute] * 3)
    # The last expert's products follow its load.
    assert seconds(0.0)[1:] == pytest.approx([layers * 1.0] * 3, rel=0.3)
