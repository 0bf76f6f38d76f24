"""Compute and transfers on one clock."""

from __future__ import annotations

import json

import pytest

from host_offload.queue.transfer import DEMAND, QueueError, Transfer
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
