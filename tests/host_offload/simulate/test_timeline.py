"""Compute and transfers on one clock."""

from __future__ import annotations

import json

import pytest

from host_offload.queue.transfer import DEMAND, QueueError, Transfer
from host_offload.simulate.timeline import (
    DEVICE,
    Link,
    Need,
    Timeline,
    TimelineEvent,
    trace_events,
    write_trace,
)


def transfer(number, cause="prefetch", layer=0):
    return Transfer(layer, number, 0, number, cause)


def test_what_is_there_comes_first_and_a_prefetch_that_is_needed_is_a_demand():
    timeline = Timeline(Link(1.0, chunk_bytes=3))
    timeline.submit(transfer(0), 30)
    needed = [timeline.submit(transfer(1), 3), timeline.submit(transfer(2, DEMAND), 3)]
    timeline.compute_experts(0, 6.0, [Need(ticket, 3.0) for ticket in needed])
    # Both pass the first, and are there at 6, when what was there is computed.
    assert timeline.now == pytest.approx(12.0)
    names = [event.name for event in timeline.events if event.track == "link"]
    assert names[:4] == [f"demand 0.{e} part {part}" for e in (1, 2) for part in (0, 1)]


def test_the_device_waits_for_the_parts_it_computes_with():
    timeline = Timeline(Link(1.0))
    timeline.compute_experts(0, 0.0, [Need(timeline.submit(transfer(0, DEMAND), 9), 1.5)])
    # Gate and up are there at 6 and take 1; down is at 9.
    assert timeline.now == pytest.approx(9.5)


def test_the_device_loses_what_moves_beside_it():
    timeline = Timeline(Link(1.0, chunk_bytes=1, beside=0.5))
    timeline.compute("alone", 4.0)
    assert timeline.now == 4.0
    timeline.submit(transfer(0), 100)
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
