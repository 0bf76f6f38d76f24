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
from host_offload.policies.prefetch.expert_map.store import (
    MapStore,
    Trajectory,
    selected,
    semantic_scores,
)
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, SamplingParams
from moejax.engine.step_work import Step, chosen_in_step
from moejax.errors import UserError
from tests.hlo import arena_copies, read_executable
from tests.moejax.engine_runs import Job, mixed_jobs, run
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs
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


def half(store: MapStore) -> MapStore:
    """As the device holds it."""
    embeddings, maps = rounded(store.embeddings, store.maps.swapaxes(0, 1))
    embeddings, maps = embeddings.astype(np.float32), maps.swapaxes(0, 1).astype(np.float32)
    return MapStore(embeddings, maps, np.sqrt(np.cumsum(np.einsum("lne,lne->ln", maps, maps), 0)))


def predicted(store: MapStore, distance: int, embedding, probs) -> np.ndarray:
    """bool[L, E]: what the host form's functions want of the layers of a step of one row."""
    wanted = np.zeros(probs.shape[::2], bool)
    scores = semantic_scores(store, embedding)
    for layer in range(distance):
        wanted[layer] = chosen(store, scores, layer)
    trajectory = Trajectory.of(store, 1)
    for layer in range(len(probs) - distance):
        trajectory = trajectory.after(store, layer, probs[layer])
        wanted[layer + distance] = chosen(store, trajectory.scores(store, layer), layer + distance)
    return wanted


def chosen(store: MapStore, scores: np.ndarray, layer: int) -> np.ndarray:
    nearest = np.argmax(scores, axis=1)
    return selected(store.maps[layer, nearest], scores[0, nearest], TOP_K)[0]


@NATIVE
@pytest.mark.parametrize("distance", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_steps_decide_what_the_host_form_would(distance, at_rest):
    """One row a step, cells for twice top-k: what the map wants of a layer is there when the layer
    runs, and nothing else was fetched."""
    _, trace = at_rest
    policy = in_step.fit(trace, capacity=80, distance=distance, share=0.5)
    store = half(policy.init(spec_of(trace.header)).store)
    steps: list[Step] = []
    policy = dataclasses.replace(policy, learns=True)  # so that steps give out their probabilities
    with pytest.MonkeyPatch.context() as patch, searching(policy, ops="cpu") as llm:
        patch.setattr(ExpertMapInStep, "_learned", lambda policy, state, seen: state)
        llm.engine.listener = steps.append
        for seed in range(3):
            job = decoding(seed)
            llm.engine.add(list(job.prompt), job.params)
            while not llm.engine.idle:
                llm.engine.step()
        runner = llm.engine.runner
        (key,) = (key for key in runner.executables() if key.maps and key.kind == "decode")
        compiled = read_executable(runner._executable(key).result())
        assert runner.steps.owned and arena_copies(compiled, runner.arena) == []
    fetched = checked = beyond = 0
    for step in steps:
        if step.kind != "decode":
            assert step.output.ahead is None
            continue
        arrays, missed = step.output.arrays, step.output.read().missed
        wanted = predicted(
            store, distance, np.asarray(arrays.embedding)[:1], np.asarray(arrays.probs)[:, :1]
        )
        entries = chosen_in_step(step.output)
        assert np.all(wanted[entries[:, 0], entries[:, 1]]) and np.all(entries[:, 3] == 1)
        small = wanted.sum(axis=1) <= 8
        assert not np.any(missed[small] & wanted[small])
        fetched, checked = fetched + len(entries), checked + small.sum()
        beyond += int(np.any(wanted.sum(axis=1) > TOP_K))
    assert fetched > 100 and checked > 150 and beyond > 0


@pytest.mark.nightly
def test_a_fitted_store_needs_no_probabilities(at_rest, tmp_path):
    wanted, trace = at_rest
    policy = in_step.fit(trace, capacity=50, distance=3)
    assert policy.fitted is not None and not policy.needs
    policy.fitted.write(tmp_path / "maps.safetensors")
    options = {"prefetch": f"expert_map_in_step={tmp_path / 'maps.safetensors'}", **LIMITS}
    with LLM("demo", ops="xla", expert_budget="25%", progress=False, **options) as llm:
        assert not llm.engine.runner.steps.trace_arrays
        assert_same_bits(run(llm, mixed_jobs()), wanted)
        assert llm.stats()["control"]["transfers"]["prefetch"]["used"] > 50


@pytest.mark.nightly
def test_kernels_interpreted():
    with interpreted_llm("demo", max_model_len=128, max_num_seqs=4) as llm:
        wanted = run(llm, three_jobs(4096), check=False)
    policy = ExpertMapInStep(capacity=20, distance=2)
    options: dict[str, Any] = {"expert_budget": "40%", "policies": [policy]}
    with interpreted_llm("demo", max_model_len=128, max_num_seqs=4, **options) as llm:
        assert_same_bits(run(llm, three_jobs(4096)), wanted)
        assert llm.stats()["ops"]["stage"] == "pallas"
        assert llm.stats()["control"]["transfers"]["prefetch"]["used"] > 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"driver": "host"}, "driver='host' does not; use driver='device'"),
        ({"precision": "dynaexq"}, "one version of the experts"),
        ({"memory": "1MiB", "policies": [ExpertMapInStep(capacity=10_000)]}, "lower the maps'"),
        ({"policies": [ExpertMapInStep(distance=4)]}, "distance must lie in 1…3"),
        ({"policies": [ExpertMapInStep(capacity=0)]}, "capacity must be at least 1"),
    ],
    ids=("host driver", "two versions", "little memory", "far ahead", "no maps"),
)
def test_refusals(options, says):
    options = {"policies": [ExpertMapInStep()], **options}
    with pytest.raises(UserError, match=says):
        LLM("demo", progress=False, **LIMITS, **options)
