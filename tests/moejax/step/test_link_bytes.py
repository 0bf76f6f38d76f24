"""Bytes over the link are those of the store, whatever a cell takes: the same number in statistics,
traces, replays and predictions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from host_offload.simulate.prediction import predict
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import read_trace
from host_offload.versions.layer_versions import record_bytes
from tests.host_offload.sizing.cost_models import MODEL
from tests.moejax.engine.scenes import GREEDY, LAYERS, RECORD, open_llm


@pytest.mark.slow
def test_bytes_are_those_that_were_moved(tmp_path):
    options = {"prefetch": "random", "expert_budget": "50%", "trace": tmp_path / "t"}
    with open_llm(precision="lossless12,in_transit=true", **options) as llm:
        llm.generate(["The old house stood", "def area(width, height):"], GREEDY)
        stats, (size,) = llm.stats(), llm.engine.runner.link_bytes
    assert 0.7 * RECORD < size < 0.8 * RECORD
    staged = stats["control"]["transfers"]["random"]
    moved = {"fill": stats["experts"]["fills"], "read_through": stats["experts"]["read_through"]}
    moved = {name: count * size for name, count in (moved | {"stage": staged["done"]}).items()}
    assert moved["fill"] and moved["stage"]
    assert {**stats["bytes"], "stage": staged["bytes"]} == moved
    trace = read_trace(tmp_path / "t")
    by_cause = dict(zip(trace.header.causes, trace.array("step.bytes").sum(0), strict=True))
    assert by_cause == moved
    assert sum(t.bytes for t in trace.transfers() if t.published >= 0) == moved["stage"]
    found = replay(trace)  # which compares every step's bytes with the trace's
    assert found.bytes is not None and found.bytes.sum() == sum(moved.values())
    told = spec_of(trace.header)
    assert told.version_bytes["dense"].tolist() == [RECORD] * LAYERS
    assert told.link_bytes["dense"].tolist() == [size] * LAYERS
    assert trace.header.spec["link_bytes"] == {"dense": size}
    model = dataclasses.replace(MODEL, layers=LAYERS, experts=16, expert_bytes=RECORD)
    model = dataclasses.replace(model, top_k=trace.header.top_k)
    found = simulate(trace, eviction="lru")  # without the prefetch
    assert found.bytes is not None and found.misses.sum() > 0
    np.testing.assert_array_equal(found.bytes, found.misses * size)
    assert predict(trace, model, eviction="lru").bytes == found.bytes.sum()


def test_dense_experts_move_what_their_cells_take():
    layout = type("Layout", (), {"records": [type("R", (), {"nbytes": 7})]})
    assert record_bytes(layout, None, moved=True) == (7,)  # type: ignore[arg-type]
