"""An engine whose decode steps search expert maps themselves: the same bits, the host form's
decisions, a store that is written between steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from host_offload.control.rules import PolicyError
from host_offload.memory.budget import format_bytes
from host_offload.policies.prefetch.expert_map import in_step
from host_offload.policies.prefetch.expert_map.in_step import ExpertMapInStep
from host_offload.policies.prefetch.expert_map.policy import ExpertMap
from host_offload.policies.prefetch.expert_map.step_search import BITS, rounded
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, SamplingParams
from tests.moejax.engine_runs import Job, mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.slow

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
MAPS = {"trace_arrays": "probs,embedding"}
TOP_K, LAYERS, EXPERT = 4, 4, 98_304
"""The last: bytes of an expert."""


def decoding(seed: int, count: int = 24) -> Job:
    prompt = tuple(np.random.default_rng(seed).integers(1, 4096, 20).tolist())
    return Job(prompt, SamplingParams(max_tokens=count, seed=seed, ignore_eos=True))


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory):
    """Everything resident: the bits, and a trace of the routing."""
    directory = tmp_path_factory.mktemp("rest") / "t"
    with LLM("demo", ops="xla", **LIMITS, progress=False, trace=directory, **MAPS) as llm:
        found = run(llm, mixed_jobs(), check=False)
    return found, read_trace(directory)


@contextmanager
def searching(policy: ExpertMapInStep, **options: Any) -> Iterator[LLM]:
    options = {"ops": "xla", "expert_budget": "50%", "progress": False, **LIMITS, **options}
    with LLM("demo", policies=[policy], **options) as llm:
        yield llm


def assert_same_bits(found, wanted) -> None:
    assert all(a.same_bits(b) for a, b in zip(found, wanted, strict=True))


def test_same_bits_while_the_store_grows(at_rest, tmp_path):
    """All invariants after every step; transfers are counted, traced and used; what the trace's
    policy wrote is what the device holds."""
    wanted, _ = at_rest
    policy = ExpertMapInStep(capacity=60, distance=2)
    with searching(policy, expert_budget="40%", trace=tmp_path / "t") as llm:
        assert_same_bits(run(llm, mixed_jobs()), wanted)
        runner, controller = llm.engine.runner, llm.engine.control.controller
        counts = controller.staging.counts["prefetch"]
        assert counts["done"] > 200 and counts["used"] > 100 and not counts["skipped"]
        assert [str(k) for k in runner.executables() if k.maps] == [
            "write_maps_maps60x2",
            "decode_traced_maps60x2",
        ]
        store = controller._seats[0].state.store
        assert store.size == 60
        llm.engine.control.before_step(10_000)  # what the last step taught is written now
        half = np.asarray(runner.maps.embeddings), np.asarray(runner.maps.maps)
        wanted_rows = rounded(store.embeddings, store.maps.swapaxes(0, 1))
        assert np.array_equal(half[0], wanted_rows[0])
        assert np.array_equal(half[1], wanted_rows[1].swapaxes(0, 1))
        np.testing.assert_allclose(
            np.asarray(runner.maps.lengths) * 2.0**-BITS, store.lengths, rtol=3e-3
        )
        notes = " ".join(llm.stats()["notes"])
        assert f"expert maps take {format_bytes(policy.search.nbytes(4, 16, 128))}" in notes
    trace = read_trace(tmp_path / "t")
    made = [t for t in trace.transfers() if t.published >= 0]
    assert len(made) > 150 and {t.layer for t in made} == {0, 1, 2, 3}
    assert trace.array("step.bytes")[:, 2].sum() == counts["bytes"]


@NATIVE
@pytest.mark.parametrize("budget", ["25%", pytest.param("62.5%", marks=pytest.mark.nightly)])
def test_a_simulation_counts_what_steps_do(budget, tmp_path):
    """Of routing that was recorded without the policy, in another engine and with everything
    resident; then at other budgets and over a link. A replay has each hit, transfer and decision. A
    trace without routers' probabilities is refused."""
    with LLM("demo", ops="cpu", **LIMITS, progress=False, trace=tmp_path / "rest", **MAPS) as llm:
        run(llm, mixed_jobs(), check=False)
    trace = read_trace(tmp_path / "rest")
    fitted = in_step.fit(trace, capacity=40, distance=3, share=0.5)
    for policy in (ExpertMapInStep(capacity=30), fitted):
        found = simulate(trace, policies=[policy], cells=cells_of(budget), driver="device")
        options = {"ops": "cpu", "link_rate": "200MB/s", "trace": tmp_path / policy_name(policy)}
        with searching(policy, expert_budget=budget, **options, **MAPS) as llm:
            run(llm, mixed_jobs(), check=False)
        engine = read_trace(options["trace"])
        assert np.array_equal(replay(engine, policies=[policy]).staged, found.staged)
        for name in ("hits", "fills", "read_through"):
            assert np.array_equal(engine.array(f"step.{name}"), getattr(found, name)), name
        assert engine.array("step.bytes")[:, 2].sum() == found.staged.sum() * EXPERT
        assert found.staged.sum() > 100
    with pytest.raises(TraceError, match=r"the trace has .*, the replay"):
        replay(engine, policies=[dataclasses.replace(fitted, distance=2)])
    bare = dataclasses.replace(engine, header=dataclasses.replace(engine.header, embedding=0))
    with pytest.raises(TraceError, match="a decode step searches 'embedding', which"):
        simulate(bare, policies=[fitted], driver="device")
    with pytest.raises(PolicyError, match="use driver='device'"):
        simulate(trace, policies=[policy], driver="host")


@NATIVE
def test_maps_from_empty_learn_each_step_when_the_host_does(tmp_path):
    """The host form, whose engine reads a step before it dispatches the next one: simulated from a
    run without hooks, whose steps were read later, it learns each step when that engine does."""
    with LLM("demo", ops="cpu", **LIMITS, progress=False, trace=tmp_path / "rest", **MAPS) as llm:
        run(llm, [decoding(1), decoding(2)], check=False)
    trace = read_trace(tmp_path / "rest")
    steps = list(trace.step_traces())
    late = [a for a, b in itertools.pairwise(steps) if a.read_s > b.start_s]
    assert late  # the other order of reads
    policy = ExpertMap(capacity=30, pool=False)
    found = simulate(trace, policies=[policy], cells=4, driver="host")
    options = {"driver": "host", "ops": "cpu", "expert_budget": "25%", "progress": False, **LIMITS}
    with LLM("demo", policies=[policy], trace=tmp_path / "engine", **options) as llm:
        run(llm, [decoding(1), decoding(2)], check=False)
    engine = read_trace(tmp_path / "engine")
    for name in ("hits", "fills", "read_through"):
        assert np.array_equal(engine.array(f"step.{name}"), getattr(found, name)), name
    assert found.staged.sum() > 50


def cells_of(budget: str) -> int:
    return int(float(budget.rstrip("%")) / 100 * 16)


def policy_name(policy: ExpertMapInStep) -> str:
    return "given" if policy.fitted else "empty"
