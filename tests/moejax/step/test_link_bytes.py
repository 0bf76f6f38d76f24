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
from moejax import LLM, SamplingParams
from tests.host_offload.sizing.cost_models import MODEL

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DENSE = 96 * 1024
"""Bytes of an expert of the demo."""


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """An LLM of that precision that has run, half of its experts in cells: (link bytes of an
    expert, statistics, trace)."""
    found = {}

    def run(precision: str):
        if precision not in found:
            directory = tmp_path_factory.mktemp("traces") / "t"
            options = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256)
            with LLM(
                "demo",
                precision=precision,
                prefetch="random",
                expert_budget="50%",
                trace=directory,
                progress=False,
                **options,  # type: ignore[arg-type]
            ) as llm:
                llm.generate(["The old house stood", "def area(width, height):"], GREEDY)
                runner = llm.engine.runner
                assert runner.link_bytes == tuple(
                    s.shape[2] * s.shape[3] * 2 for s in runner.stores
                )
                stats, (size,) = llm.stats(), runner.link_bytes
            found[precision] = size, stats, read_trace(directory)
        return found[precision]

    return run


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["lossless12,in_transit=true", "lossless12"])
def test_bytes_are_those_that_were_moved(run_of, precision):
    size, stats, trace = run_of(precision)
    assert 0.7 * DENSE < size < 0.8 * DENSE
    staged = stats["control"]["transfers"]["random"]
    moved = {"fill": stats["experts"]["fills"], "read_through": stats["experts"]["read_through"]}
    moved = {name: count * size for name, count in (moved | {"stage": staged["done"]}).items()}
    assert moved["fill"] and moved["stage"]
    assert {**stats["bytes"], "stage": staged["bytes"]} == moved
    by_cause = dict(zip(trace.header.causes, trace.array("step.bytes").sum(0), strict=True))
    assert by_cause == moved
    assert sum(t.bytes for t in trace.transfers() if t.published >= 0) == moved["stage"]
    found = replay(trace)  # which compares every step's bytes with the trace's
    assert found.bytes is not None and found.bytes.sum() == sum(moved.values())


@pytest.mark.nightly
def test_cells_and_the_link_differ_in_transit_only(run_of):
    size, _, trace = run_of("lossless12,in_transit=true")
    told = spec_of(trace.header)
    assert told.version_bytes["dense"].tolist() == [DENSE] * 4
    assert told.link_bytes["dense"].tolist() == [size] * 4
    assert trace.header.spec["link_bytes"] == {"dense": size}
    plain = dataclasses.replace(told, moved_bytes=None)
    assert plain.link_bytes is plain.version_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("fast", [True, False])
def test_what_is_simulated_and_predicted_moves_the_stores_bytes(run_of, fast):
    """Without the prefetch, so both ways of the simulator are asked."""
    size, _, trace = run_of("lossless12,in_transit=true")
    found = simulate(trace, eviction="lru", fast=fast)
    assert found.bytes is not None and found.misses.sum() > 0
    np.testing.assert_array_equal(found.bytes, found.misses * size)
    top_k = trace.header.top_k
    model = dataclasses.replace(MODEL, layers=4, experts=16, top_k=top_k, expert_bytes=DENSE)
    predicted = predict(trace, model, eviction="lru", fast=fast)
    assert predicted.bytes == found.bytes.sum()


@pytest.mark.slow
def test_a_traces_bytes_of_the_cells_are_found_out(run_of):
    """A header that says nothing of the link is read as before: cells' bytes, which differ."""
    _, _, trace = run_of("lossless12,in_transit=true")
    spec = {**trace.header.spec, "link_bytes": None}
    header = dataclasses.replace(trace.header, spec=spec)
    chunks = tuple(dataclasses.replace(chunk, header=header) for chunk in trace.chunks)
    with pytest.raises(ValueError, match=r"bytes: the trace has|transfer: the trace has"):
        replay(dataclasses.replace(trace, header=header, chunks=chunks))


def test_dense_experts_move_what_their_cells_take():
    layout = type("Layout", (), {"records": [type("R", (), {"nbytes": 7})]})
    assert record_bytes(layout, None, moved=True) == (7,)  # type: ignore[arg-type]
