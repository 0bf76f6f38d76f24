"""Algorithm 1 on the virtual clock, under random durations."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.transfer import QueueError
from host_offload.simulate.stream_timeline import StreamedLayer, stream_passes
from host_offload.simulate.timeline import DEVICE, LayerCost, Link, Timeline

PARTS = (2, 2, 3)
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
    stream_passes(timeline, "link", PARTS, passes)
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
            chunks = sum(-(-n // link.chunk_bytes) for n in PARTS) * streamed
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
            per_part = -(-PARTS[part] // link.chunk_bytes)
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


@given(plays())
def test_a_wait_left_out_is_found(play):
    """Products begin when their turn comes, whatever is there of their expert."""
    layers, link, passes = play
    slow = Link(link.rate / 100, link.latency, chunk_bytes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "wait", lambda *_: None)
        with pytest.raises(QueueError):  # the cells are taken while they are written
            out_of_order(layers, slow, passes)


def test_a_pass_takes_the_longer_of_computing_and_loading():
    """And no more than a layer beside it."""
    layers, rate = 4, 14.0

    def seconds(product: float) -> list[float]:
        one = StreamedLayer(LayerCost(1.0, 0.0, 0.0), [(product, product)] * 2)
        timeline = Timeline({"link": Link(rate, chunk_bytes=1)})
        return stream_passes(timeline, "link", PARTS, [[one] * layers] * 4)

    compute, load = 1 + 2 * 2 * 1.0, 2 * sum(PARTS) / rate
    assert load == 1.0
    assert seconds(1.0)[1:] == pytest.approx([layers * compute] * 3)
    # The last expert's products follow its load.
    assert seconds(0.0)[1:] == pytest.approx([layers * 1.0] * 3, rel=0.3)
