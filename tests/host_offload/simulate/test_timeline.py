"""Compute and transfers on one clock."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.transfer import DEMAND, QueueError, Transfer
from host_offload.simulate.timeline import (
    DEVICE,
    Event,
    LayerCost,
    Link,
    Need,
    Timeline,
    trace_events,
    write_trace,
)

COST = LayerCost(before=0.5, gate_up=1.0, down=0.5)
NONE = LayerCost(before=0.5, gate_up=0.0, down=0.0)
"""COST where no expert is there."""
PARTS = (1, 1, 1)
RATE = 3 / COST.total
"""At which an expert takes as long as a layer."""


def transfer(number, cause="prefetch", layer=0):
    return Transfer(layer, number, 0, number, cause)


def need(ticket):
    return Need(ticket, COST.gate_up, COST.down)


def line(rate=RATE, latency=0.0):
    return Timeline({"link": Link(rate, latency, chunk_bytes=1)})


def test_transfers_in_series_take_the_sum():
    timeline = line()
    for layer in range(8):
        timeline.compute("before", COST.before)
        ticket = timeline.submit("link", transfer(layer, DEMAND), PARTS)
        timeline.wait("link", ticket)
        timeline.experts(layer, COST, "link", [])
    assert timeline.now == pytest.approx(8 * 2 * COST.total)


def test_a_layer_waits_for_gate_and_up_first():
    """A demand after the router takes 2 s; gate and up are there after 4/3 s, and down's part
    travels during their products."""
    timeline = line()
    timeline.compute("before", COST.before)
    timeline.experts(0, NONE, "link", [need(timeline.submit("link", transfer(0, DEMAND), PARTS))])
    assert timeline.now == pytest.approx(0.5 + 4 / 3 + 1.0 + 0.5)
    waited = [e for e in timeline.events if e.name == "wait"]
    assert sum(e.end - e.begin for e in waited) == pytest.approx(4 / 3)


def test_a_layer_ahead_takes_the_larger_and_fills_the_pipeline():
    timeline = line()
    tickets = [timeline.submit("link", transfer(layer), PARTS) for layer in range(8)]
    for layer, ticket in enumerate(tickets):
        timeline.layer(layer, NONE, "link", [need(ticket)])
    first = timeline.now
    assert COST.total * 8 < first < COST.total * 9.01


def test_over_the_border_of_a_step_nothing_is_lost():
    timeline = line()
    ahead = [timeline.submit("link", transfer(layer), PARTS) for layer in range(8)]
    timeline.wait_until(8 * COST.total)
    began = timeline.now
    for step in range(1, 4):
        coming = [timeline.submit("link", transfer(8 * step + n), PARTS) for n in range(8)]
        for layer, ticket in enumerate(ahead):
            timeline.layer(layer, NONE, "link", [need(ticket)])
        ahead = coming
    assert timeline.now - began == pytest.approx(3 * 8 * COST.total)


def test_a_demand_waits_for_one_chunk_of_a_prefetch():
    timeline = Timeline({"link": Link(rate=1.0, chunk_bytes=2)})
    timeline.submit("link", transfer(0), (10,))
    timeline.compute("before", 3.0)
    timeline.wait("link", timeline.submit("link", transfer(1, DEMAND), (1,)))
    assert timeline.now == pytest.approx(5.0)


def test_a_disk_in_front_of_the_link_and_a_worker_beside_the_device():
    timeline = Timeline({"disk": Link(1.0), "link": Link(10.0)})
    timeline.wait("disk", timeline.submit("disk", transfer(0), (4,)))
    timeline.wait("link", timeline.submit("link", transfer(0), (4,)))
    assert timeline.now == pytest.approx(4.4)
    ends = timeline.give("decoder", "decode 0.0", 1.0)
    assert timeline.give("decoder", "decode 0.1", 1.0) == pytest.approx(ends + 1.0)
    timeline.compute("layer 0", 0.25)
    timeline.wait_until(ends)
    assert timeline.now == pytest.approx(5.4)
    assert {e.track for e in timeline.events} == {DEVICE, "disk", "link", "decoder"}


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3)), max_size=8), st.floats(0.2, 4))
def test_the_time_lies_between_the_larger_and_the_sum(layers, rate):
    timeline, compute, moved = line(rate), 0.0, 0
    for number, (seconds, misses) in enumerate(layers):
        cost = LayerCost(seconds, seconds, 0.0)
        asked = [timeline.submit("link", transfer(10 * number + n), PARTS) for n in range(misses)]
        needs = [Need(ticket, seconds / 2, seconds / 4) for ticket in asked]
        timeline.layer(number, cost, "link", needs)
        compute, moved = compute + cost.total + misses * seconds * 0.75, moved + 3 * misses
    assert max(compute, moved / rate) - 1e-9 <= timeline.now <= compute + moved / rate + 1e-9
    by_track = {}
    for event in timeline.events:
        assert event.begin >= by_track.get(event.track, 0.0) - 1e-9
        by_track[event.track] = event.end


def test_what_is_there_is_computed_while_the_rest_travels():
    """Two seconds of hits cover a transfer's gate and up; what is needed goes before a prefetch
    that was queued between."""
    timeline = Timeline({"link": Link(1.0, chunk_bytes=1)})
    tickets = [timeline.submit("link", transfer(n), PARTS) for n in range(3)]
    hits = LayerCost(before=0.0, gate_up=2.0, down=0.0)
    timeline.experts(0, hits, "link", [Need(tickets[2], 1.0, 1.0), Need(tickets[0], 1.0, 1.0)])
    # 0: gate and up there at 2, computed until 3, then down. 2: there at 5, until 6, then down.
    assert timeline.now == pytest.approx(7.0)
    carried = [e.name for e in timeline.events if e.track == "link"]
    assert carried[:6] == [f"demand 0.{n} part {i}" for n in (0, 2) for i in range(3)]
    assert carried[6] == "prefetch 0.1 part 0"


def test_what_has_come_goes_before_what_was_queued_first():
    timeline = Timeline({"link": Link(1.0, chunk_bytes=1)})
    first = timeline.submit("link", Transfer(0, 0, 0, 0, DEMAND, priority=9), (30, 30, 30))
    second = timeline.submit("link", transfer(1, DEMAND), PARTS)
    hits = LayerCost(before=0.0, gate_up=3.0, down=1.0)
    timeline.experts(0, hits, "link", [Need(first, 1.0, 1.0), Need(second, 1.0, 1.0)])
    # The second from 4 on until 6; the first's gate and up are there at 63, its down at 93.
    assert timeline.now == pytest.approx(94.0)
    waits = [(e.begin, e.end) for e in timeline.events if e.name == "wait"]
    assert waits[0][0] == pytest.approx(6.0)


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
    events = [Event("link", "demand 0.1 part 0", 0.001, 0.002), Event(DEVICE, "layer 0", 0, 0.001)]
    write_trace(tmp_path / "trace.json", events)
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == trace_events(events)
    names = [e["args"]["name"] for e in read["traceEvents"] if e["ph"] == "M"]
    assert names == [DEVICE, "link"]
    span = [e for e in read["traceEvents"] if e["ph"] == "X"][1]
    assert (span["ts"], span["dur"], span["tid"]) == (1000.0, 1000.0, 1)
