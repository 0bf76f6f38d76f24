"""A traced engine writes what it did, the same outputs as without, and says when it cannot."""

from __future__ import annotations

import dataclasses
import errno
import os
import types
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.control.interface import Moment, StagedTransfer
from host_offload.control.step_record import USES, StepRecord
from host_offload.traces import writer as trace_writer
from host_offload.traces.reader import TraceHeader
from host_offload.traces.writer import TraceWriter
from moejax import LLM, SamplingParams, UserError
from moejax.engine.step_work import moved_bytes
from moejax.step.experts import Paging
from moejax.traces import read_trace
from moejax.traces.tracer import Tracer

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
PROMPTS = [list(range(5, 5 + n)) for n in (70, 3, 1)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

HEADER = TraceHeader(
    2, 8, 2, config_digest="0f", spec={}, machine={}, command=["run"], created="now"
)


def record(number: int, kind: str = "decode", read_s: float = 0.0, staged_bytes=0) -> StepRecord:
    rng = np.random.default_rng(number)
    waves = 3 if kind == "prefill" else 1
    return StepRecord(
        number=number,
        kind=kind,
        start_s=read_s - 0.5,
        read_s=read_s,
        seconds=0.0,
        rows=4,
        compiled=number == 0,
        request=np.arange(3, dtype=np.int32),
        user=np.full(3, -1, np.int32),
        position=np.arange(3, dtype=np.int32) + number,
        phase=np.ones(3, np.uint8),
        ids=rng.integers(8, size=(3, 2, 2)).astype(np.int16),
        weights=rng.random((3, 2, 2), dtype=np.float32),
        hits=np.array([3, 3], np.int32),
        fills=np.array([2, 1], np.int32),
        read_through=np.array([1, 1], np.int32),
        waves=np.full(2, waves, np.int16),
        missed=rng.random((2, 8)) < 0.4,
        bytes=np.array([300, 200, staged_bytes]),
        use=np.arange(len(USES)) if number == 2 else np.full(len(USES), -1),
        finished=(1,) if number == 1 else (),
    )


def test_bytes_are_by_version_and_cause():
    """Of one version by the counts, of several by the demand; ahead of need by the lists."""
    paging = Paging(*(np.array(c, np.int32) for c in ([6, 5], [3, 3], [2, 1], [1, 1])))
    entries = types.SimpleNamespace(version=np.array([1, 0, 1]))
    output = types.SimpleNamespace(ahead=None)
    none: Any = types.SimpleNamespace(between=(), stages=None, output=output)
    carried = [(entries, np.array([1, 1, 0]))]
    step: Any = types.SimpleNamespace(between=carried, stages=None, output=output)
    assert moved_bytes(none, paging, None, (100,)).tolist() == [300, 200, 0]
    demand = np.array([[[1, 1], [0, 1]], [[0, 1], [1, 0]]], np.int32)
    assert moved_bytes(step, paging, demand, (100, 30)).tolist() == [160, 130, 130]


def test_optional_arrays_are_those_of_the_header(tmp_path):
    """A policy may need others than the trace."""
    header = dataclasses.replace(HEADER, probabilities=True, embedding=4)
    tracer = Tracer(TraceWriter(tmp_path / "t", header))
    probs, wide = np.full((3, 2, 8), 0.125, np.float16), np.ones((3, 2, 4), np.float16)
    embedding = np.arange(12, dtype=np.float16).reshape(3, 4)
    arrays = {"probabilities": probs, "gate_input": wide, "embedding": embedding}
    for number in range(5):
        tracer.after_read(record(number)._replace(**arrays))
    tracer.close()
    trace = read_trace(tmp_path / "t")
    for step in trace.step_traces():
        np.testing.assert_array_equal(step.probabilities, probs)
        np.testing.assert_array_equal(step.embedding, embedding)
        assert step.gate_input is None
    assert trace.steps == 5


def test_a_trace_that_cannot_go_on_is_a_users_error(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracer = Tracer(TraceWriter(tmp_path / "t", HEADER))
    tracer.after_read(record(0))
    with monkeypatch.context() as patch:
        patch.setattr(trace_writer.os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device; make room"):
            tracer.close()
    for call in (
        lambda: tracer.after_read(record(1)),
        lambda: tracer.mark("x"),
        lambda: tracer.budget([1], 1, step=0, settled=True),
        lambda: tracer.event(StagedTransfer(1, 7, 0, 3, 100, "prefetch", 0)),
    ):
        with pytest.raises(UserError, match="is closed"):
            call()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(trace, the outputs of the traced run, of a run without, routing by step, statistics)."""
    directory = tmp_path_factory.mktemp("tracing") / "t"
    routing = {}

    def listen(step):
        ids, weights = jax.device_get(step.output.routing)
        routing[step.number] = ids, weights, np.asarray(step.output.read().missed)

    options = dict(expert_budget="25%", progress=False, **LIMITS)
    with LLM("demo", trace=directory, **options) as llm:
        llm.engine.listener = listen
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = llm.stats()
        tracer, llm.engine.tracer = llm.engine.tracer, None
        untraced = llm.generate(PROMPTS, PARAMS)
        assert tracer is not None
    return read_trace(directory), outputs, untraced, routing, stats


def test_a_trace_has_every_token_of_every_step(traced):
    trace, outputs, untraced, routing, stats = traced
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in untraced]
    assert trace.complete
    steps = list(trace.step_traces())
    assert [s.number for s in steps] == [*range(len(steps))]
    assert sum(s.kind == "decode" for s in steps) == stats["steps"]["decode"]
    assert sum(s.kind == "prefill" for s in steps) == stats["steps"]["prefill"]
    seen = set()
    for step in steps:
        assert step.phase.tolist() == [step.kind == "decode"] * len(step.request)
        assert (np.diff(step.ids, axis=2) > 0).all()
        seen |= set(zip(step.request.tolist(), step.position.tolist(), strict=True))
        ids, weights, missed = routing[step.number]
        np.testing.assert_array_equal(step.missed, missed)
        # Every routed token, in batch order, and no padding.
        real = ids[0, :, 0] < trace.header.experts
        np.testing.assert_array_equal(step.ids, ids[:, real].transpose(1, 0, 2))
        np.testing.assert_array_equal(step.weights, weights[:, real].transpose(1, 0, 2))
    wanted = {(r, p) for r, ids in enumerate(PROMPTS) for p in range(len(ids) + 5)}
    assert seen == wanted
    assert {r for s in steps for r in s.finished} == {0, 1, 2}


def test_a_trace_adds_up_to_the_statistics(traced):
    trace, _, _, _, stats = traced
    experts, moved = stats["experts"], stats["bytes"]
    for name in ("hits", "fills", "read_through"):
        assert int(trace.array(f"step.{name}").sum()) == experts[name]
    missed = sum(int(s.missed.sum()) for s in trace.step_traces())
    assert missed == experts["fills"] + experts["read_through"] > 0
    by_cause = dict(zip(trace.header.causes, trace.array("step.bytes").sum(axis=0), strict=True))
    assert by_cause == {"fill": moved["fill"], "read_through": moved["read_through"], "stage": 0}
    seconds = trace.array("step.seconds")
    assert (seconds > 0).all()
    assert seconds.sum() <= stats["time"]["prefill_s"] + stats["time"]["decode_s"] + 1e-3
    assert trace.array("step.compiled").sum() == 2  # prefill and decode
    # A step costs from its dispatch, or from the read before it, to its read.
    start, read = trace.array("step.start_s"), trace.array("step.read_s")
    assert (np.diff(read) >= 0).all()
    np.testing.assert_allclose(seconds[1:], read[1:] - np.maximum(start[1:], read[:-1]), atol=1e-4)


def test_a_bad_directory_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(UserError, match="not an empty directory; a trace is never overwritten"):
        LLM("/no/such/model", trace=tmp_path)


def test_a_start_that_fails_leaves_no_directory(tmp_path):
    """So that the same command runs once what was wrong is mended."""

    @dataclasses.dataclass(frozen=True)
    class Fails:
        moments = frozenset({Moment.STEP_END})
        needs = writes = frozenset[str]()

        def init(self, spec):
            raise RuntimeError("nothing learned yet")

        def decide(self, state, observation):
            raise AssertionError("it never starts")

    with pytest.raises(RuntimeError, match="nothing learned yet"):
        LLM("demo", trace=tmp_path / "trace", policies=[Fails()], progress=False, **LIMITS)
    assert not (tmp_path / "trace").exists()
