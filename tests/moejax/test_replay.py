"""A trace replayed by the simulator is what the engine did: every count, byte and decision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.arena import SlotClass
from host_offload.eviction import POLICIES, with_eviction
from host_offload.policies.fifo import FIFO
from host_offload.policies.static import Static
from host_offload.policy import Decision, Moment, Policy
from host_offload.policy_rules import BETWEEN_LAYERS
from host_offload.prefetch import PREFETCH
from host_offload.replay import replay
from host_offload.simulator import simulate, spec_of
from host_offload.tables import empty_tables, with_contents
from host_offload.traces import Trace, TraceError, TraceWriter, read_trace
from moejax import LLM, SamplingParams
from moejax.budgets import try_grant
from moejax.control import start_control
from moejax.tracing import start_trace
from tests.host_offload.erratic_policy import Erratic
from tests.host_offload.policy_runs import scripted
from tests.moejax.engine_runs import Job, run
from tests.moejax.test_control import NextLayer

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
JOBS = [
    Job(tuple(range(7 * i + 5, 7 * i + 25 + 40 * i)), GREEDY, arrival=(0, 12, 60)[i])
    for i in range(3)
]
"""The last one arrives when nothing is left to do, so a step is read before the next is made."""

OWN: dict[str, tuple[Policy, ...]] = {
    "RecentPrefetch": (RecentPrefetch(),),
    "Static": (Static(warmup=90),),
    "FIFO": (FIFO(), RecentPrefetch(window=2)),
    "Erratic": (Erratic(),),
    "Scripted": (
        scripted(
            {(Moment.STEP_END, 7): Decision(cells=np.array([8, 4, 5, 6]))},
            needs={"cells", "state"},
            writes={"cells"},
        ),
        RecentPrefetch(),
    ),
}
"""Policies beside those that have a name."""

BETWEEN: dict[str, tuple[Policy, ...]] = {
    "NextLayer": (NextLayer(),),
    "Erratic between layers": (Erratic(moments=frozenset(Moment)),),
}

NAMES = {"device": [*POLICIES, *OWN], "host": [*POLICIES, *OWN, *BETWEEN]}
IN_CI = {"device": NAMES["device"], "host": ["lfru", "FIFO", *BETWEEN]}


@pytest.fixture(scope="module")
def start():
    """Driver → the demo with half of its experts; sweeps have two waves."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(driver: str) -> LLM:
            # A policy that stages, so that all executables are there.
            policies, budget = [RecentPrefetch()], {"expert_budget": "40%", "prefill_waves": 2}
            options: dict[str, Any] = {"driver": driver, "policies": policies, **budget, **LIMITS}
            return stack.enter_context(LLM("demo", progress=False, **options))

        yield start


def traced(llm: LLM, directory, eviction: str | None, policies=(), jobs=JOBS) -> Trace:
    """The trace of jobs on a cold engine under other policies: contents only, nothing compiled."""
    engine = llm.engine
    runner = engine.runner
    name, policies = with_eviction(eviction, policies)
    engine.set_budget([6] * 4, engine.scheduler.arena.count(SlotClass.KV))
    layers, experts = runner.tables.address.shape
    cold = empty_tables(layers, experts, experts, "lru")._asdict()
    del cold["cell_row"]
    runner.tables = with_contents(runner.tables, cold)
    runner.hooks = None
    engine.control = start_control(
        runner, policies, max_model_len=LIMITS["max_model_len"], seed=0, routers=[]
    )
    engine._steps = itertools.count()
    settings = {"model": "demo", "eviction": name, "driver": runner.driver}
    tracer = start_trace(directory, runner, dtype=llm.dtype, seed=0, settings=settings)
    if engine.control is not None:
        engine.control.controller.listener = tracer.event
        engine.control.set_budget = functools.partial(try_grant, runner, engine.scheduler)
    engine.tracer = tracer
    run(llm, jobs, check=False)
    if engine.control is not None:
        engine.control.finish()
    tracer.close()
    engine.tracer = engine.control = None
    return read_trace(directory)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        pytest.param(driver, name, marks=() if name in IN_CI[driver] else (pytest.mark.nightly,))
        for driver, names in NAMES.items()
        for name in names
    ],
)
def test_a_replay_is_what_the_engine_did(start, driver, name, tmp_path):
    own = {**OWN, **BETWEEN}.get(name, ())
    trace = traced(start(driver), tmp_path / "t", None if own else name, own)
    found = replay(trace, policies=own, config_digest=trace.header.config_digest)
    for field in ("hits", "fills", "read_through"):
        np.testing.assert_array_equal(getattr(found, field), trace.array(f"step.{field}"))
    record = trace.header.spec["version_bytes"]["dense"]
    np.testing.assert_array_equal(found.bytes, found.transfers * record)
    assert found.misses.sum() > 0 and found.of_kind("decode").sum() > 20
    if own and name != "Static":
        assert found.staged.sum() > 0
        assert len(list(trace.transfers())) > 0
    read, dispatched = trace.array("step.read_s"), trace.array("step.start_s")
    late = read[:-1] > dispatched[1:]
    assert late.any() and not late.all()


def test_rows_have_one_order(start, tmp_path):
    """The last request runs in the first one's row, before the second in the batch of the device
    and after it in the engine's order of requests."""
    longer = dataclasses.replace(GREEDY, max_tokens=50)
    jobs = [Job((5, 6), GREEDY), Job((8, 9), longer, arrival=1), Job((11,), longer, arrival=30)]
    own = BETWEEN["Erratic between layers"]
    replay(traced(start("host"), tmp_path / "t", None, own, jobs), policies=own)


def test_what_differs_is_said(start, tmp_path):
    """Other policies than the run's, and a trace that says something else of a decision."""
    policies = (RecentPrefetch(),)
    trace = traced(start("device"), tmp_path / "t", "lru", policies)
    other = simulate(trace, eviction="lru", policies=(RecentPrefetch(window=1),))
    assert (other.transfers.sum(axis=0) != replay(trace, policies=policies).transfers.sum(0)).any()
    with pytest.raises(TraceError, match=r"the trace has .*, the replay .*; give the policies"):
        replay(trace, policies=(RecentPrefetch(window=1),))
    with pytest.raises(TraceError, match=r"step \d+: bytes: the trace has \d+, the replay 0"):
        replay(trace)
    spec = {**trace.header.spec, "cells": [3, 4, 4, 4]}
    header = dataclasses.replace(trace.header, spec=spec)
    with pytest.raises(TraceError, match=r"step 0 \(prefill\), layer 0: \w+: the trace has"):
        replay(dataclasses.replace(trace, header=header), policies=policies)
    path = tmp_path / "t" / "decisions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(TraceError, match="decision: the trace has None, the replay"):
        replay(trace, policies=policies)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(TraceError, match=r"decision: the trace has .*, the replay none"):
        replay(trace, policies=policies)
    path.write_text("".join(lines).replace("recent", "other", 1))
    with pytest.raises(TraceError, match=r"decision: the trace has .*other.*, the replay .*recent"):
        replay(trace, policies=policies)


def test_what_cannot_be_replayed(start, tmp_path):
    trace = traced(start("device"), tmp_path / "t", None, (FIFO(),))
    with pytest.raises(TraceError, match="eviction was by 'FIFO', which is no policy of moejax"):
        replay(trace)
    with pytest.raises(TraceError, match="is of another model: its configuration is"):
        replay(trace, policies=(FIFO(),), config_digest="0f" * 32)
    with pytest.raises(ValueError, match=r"writes 'kv_pages', and the simulator has no KV"):
        simulate(trace, policies=(scripted(writes={"kv_pages"}),))
    steps = [step._replace(number=step.number + 3) for step in trace.step_traces()]
    with TraceWriter(tmp_path / "late", trace.header) as writer:
        writer.append(*steps)
    late = read_trace(tmp_path / "late")
    with pytest.raises(TraceError, match=r"step 0 is not in the trace .*; use simulate"):
        replay(late, policies=(FIFO(),))
    with pytest.raises(TraceError, match="needs 'probs', which this trace does not have; record"):
        simulate(trace, policies=(scripted(needs={"probs"}),))


@pytest.mark.nightly
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_prefetch_by_name(prefetch, tmp_path):
    """Through the front door, with what the policies need of the model."""
    moments, needs = PREFETCH[prefetch]().moments, PREFETCH[prefetch]().needs
    driver = "host" if moments & BETWEEN_LAYERS else "device"
    arrays = sorted({"probs", "gate_input", "embedding"} & needs)
    options: dict[str, Any] = {"driver": driver, "expert_budget": "40%", **LIMITS}
    directory = tmp_path / "t"
    with LLM(
        "demo", prefetch=prefetch, trace=directory, trace_arrays=arrays, progress=False, **options
    ) as llm:
        run(llm, JOBS, check=False)
        assert llm.engine.control is not None
        told = llm.engine.control.controller.spec
    trace = read_trace(directory)
    # What the header says is what policies were told, except for the routers.
    said = spec_of(trace.header)
    for field in dataclasses.fields(told):
        if field.name not in ("router", "costs"):
            assert repr(getattr(said, field.name)) == repr(getattr(told, field.name))
    found = replay(trace, spec=told)
    assert found.staged.sum() > 0
