"""fMoE's expert maps: searches, selection and replacement as plain enumeration says, and the policy
over them (checkable properties of the paper: ../shared/papers.md, 4.7)."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.controller import Controller
from host_offload.control.interface import Moment, Observation, Spec
from host_offload.memory.pager import rank_cells
from host_offload.memory.tables import cold_tables
from host_offload.policies.prefetch.expert_map import expert_map_policy as expert_map
from host_offload.policies.prefetch.expert_map.expert_map_policy import ExpertMap
from host_offload.policies.prefetch.expert_map.map_matcher import (
    RESTARTS,
    AsynchronousMatcher,
    MapMatcher,
    Published,
)
from host_offload.policies.prefetch.expert_map.map_store import (
    MapStore,
    empty_store,
    select_experts,
    store_rows,
    with_rows,
)
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.moe_infinity import MoEInfinity
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from host_offload.policies.recorded import RecordedPolicy, repeat_run
from host_offload.simulate.prediction import predict
from host_offload.simulate.simulator import simulate
from host_offload.simulate.timeline import Link
from host_offload.traces.reader import Trace, TraceError
from pallas_kernels.plan.victim import victim_key
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.policies.kinds import (
    EXPERTS,
    KINDS,
    LAYERS,
    PROBABILITIES,
    ROUTES,
    TOP_K,
    experts,
    routed,
    trace_of_kinds,
    wanted,
)
from tests.host_offload.sizing.cost_models import MODEL

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

L, E, D, K = 5, 8, 6, 2


def draw(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [rows, D] and maps [rows, L, E], the latter few-peaked as a router's."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, D)), rng.dirichlet(np.full(E, 0.4), (rows, L))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / (np.linalg.norm(a) * np.linalg.norm(b)))


# ---- searches


def test_searches_find_the_largest_cosine_layer_by_layer():
    """To the rounding of rows, 2 ** -11 of an element."""
    store, (embeddings, maps) = store_rows(*draw(0, 7)), draw(1, 3)
    old_embeddings, old_maps = draw(0, 7)
    found = store.nearest_embedding(embeddings)
    for x in range(3):
        scores = [cosine(embeddings[x], old) for old in old_embeddings]
        assert found.place[x] == np.argmax(scores)
        assert found.score[x] == pytest.approx(max(scores), abs=2e-3)
    trajectory = store.trajectory(3)
    for layer in range(L):
        trajectory, found = store.nearest_map(trajectory, layer, maps[:, layer])
        first = slice(layer + 1)
        for x in range(3):
            scores = [cosine(maps[x, first], old[first]) for old in old_maps]
            assert scores[found.place[x]] == pytest.approx(max(scores), abs=4e-3)
            assert found.score[x] == pytest.approx(max(scores), abs=4e-3)
    empty = empty_store(L, E, D).nearest_embedding(embeddings)
    assert np.all(empty.score < -1)


# ---- selection


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-1, 1), st.integers(1, E))
def test_selection_is_the_smallest_set_that_there_is(seed, score, top_k):
    p = np.random.default_rng(seed).dirichlet(np.full(E, 0.5)).astype(np.float32)
    chosen = select_experts(p[None], np.array([score], np.float32), top_k)[0]
    threshold = np.clip(np.float32(1) - np.float32(score), 0, 1)
    # A sum that rounding alone keeps below is as good: either count may come out.
    sums = {
        size: max(
            float(p[list(s)].sum(dtype=np.float64)) for s in itertools.combinations(range(E), size)
        )
        for size in range(top_k, E + 1)
    }
    enough = [size for size, most in sums.items() if most >= threshold - 1e-6] or [E]
    surely = [size for size, most in sums.items() if most >= threshold + 1e-6] or [E]
    assert enough[0] <= chosen.sum() <= surely[0]
    assert p[chosen].min() >= p[~chosen].max(initial=0)


# ---- replacement


def plain_with_rows(kept: list, new: list, capacity: int, distance: int) -> list:
    """As with_rows, of lists of (embedding, map)."""
    kept = [*kept]
    for embedding, one in new:
        if len(kept) < capacity:
            kept.append((embedding, one))
            continue
        redundancy = [
            distance / L * cosine(embedding, e) + (L - distance) / L * cosine(one, m)
            for e, m in kept
        ]
        kept[int(np.argmax(redundancy))] = embedding, one
    return kept


def same_store(store: MapStore, rows: list) -> None:
    wanted = store_rows(*(np.array([row[i] for row in rows]) for i in range(2)))
    for got, want in zip(store, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("distance", [1, 3])
def test_rows_replace_who_they_make_redundant(distance):
    store, rows = empty_store(L, E, D), []
    for seed, count in enumerate((3, 4, 1, 0, 6, 2, 9)):
        embeddings, maps = draw(seed, count)
        before = [array.copy() for array in store]
        new, place = with_rows(store, embeddings, maps, capacity=6, distance=distance)
        for array, was in zip(store, before, strict=True):
            np.testing.assert_array_equal(array, was)  # a policy's state is never changed
        same = (new.embeddings[: len(before[0])] == before[0]).all(axis=1)
        assert {*np.flatnonzero(~same), *range(len(before[0]), new.size)} <= {*place.tolist()}
        store = new
        rows = plain_with_rows(rows, list(zip(embeddings, maps, strict=True)), 6, distance)
        assert store.size == min(len(rows), 6)
        same_store(store, rows)


# ---- the policy


def moment(
    which: Moment, kinds: list[int], layer: int = -1, step: int = 0, turn: int = -1, **rows: Any
) -> Observation:
    """All that a moment of a step of these kinds may show, row r of request r unless told."""
    span = slice(None) if layer < 0 else slice(layer, layer + 1)
    seen = routed(max(layer, 0), kinds)
    return dataclasses.replace(
        seen,
        moment=which,
        layer=layer,
        step=step,
        turn=turn,
        embedding=np.eye(KINDS, dtype=np.float16)[kinds],
        probs=PROBABILITIES[kinds][:, span],
        ids=ROUTES[kinds].astype(np.int16)[:, span],
        **{
            "request": np.arange(len(kinds), dtype=np.int32),
            "phase": np.ones(len(kinds), np.uint8),
            **rows,
        },
    )


def walk_kinds(policy: ExpertMap, state: Any, kinds: list[int], step: int = 0, **rows: Any):
    """A step: (what was wanted at EMBEDDED and after each router, the state after)."""
    state, decision = policy.decide(state, moment(Moment.EMBEDDED, kinds, step=step, **rows))
    found = [wanted(decision)]
    for layer in range(LAYERS):
        state, decision = policy.decide(state, moment(Moment.ROUTED, kinds, layer, step, **rows))
        found.append(wanted(decision))
    return found, policy.decide(state, moment(Moment.STEP_END, kinds, step=step, **rows))[0]


def with_maps(trace: Trace, told: Spec, **fields: Any) -> tuple[ExpertMap, Any]:
    """A policy that knows the maps of a trace, and its state."""
    policy = expert_map.fit(trace, **fields)
    return policy, policy.init(told)


def test_nearer_and_likelier_goes_first(trace, told):
    """Property 5: the order after each layer is that of p / (l − l_now) computed from scratch."""
    policy, state = with_maps(trace, told, distance=3)
    state, decision = policy.decide(state, moment(Moment.EMBEDDED, [1, 4]))
    for layer in range(-1, LAYERS):
        if layer >= 0:
            state, decision = policy.decide(state, moment(Moment.ROUTED, [1, 4], layer))
        priority = {
            (n, e): state.wanted[n, e] / (n - layer)
            for n, e in np.ndindex(LAYERS, EXPERTS)
            if n > layer and state.wanted[n, e]
        }
        got = wanted(decision)
        assert got == sorted(priority, key=lambda place: (-priority[place], place))
        assert {n for n, _ in got} == {*range(layer + 1, min(max(layer, -1) + 4, LAYERS))}


@pytest.mark.parametrize("printed", [False, True])
def test_evicted_is_the_least_probability_times_frequency(trace, told, printed):
    """Property 5 of eviction: the tables' victim under the policy's weights and prior; recency
    decides nothing. As printed, an expert that was never used is the first."""
    rng = np.random.default_rng(2)
    policy, state = with_maps(trace, told, distance=1)
    policy = dataclasses.replace(policy, printed=printed)
    frequency = rng.permutation(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS).astype(np.int32)
    if printed:
        frequency[0, np.argmax(PROBABILITIES[1, 0])] = 0
    decision = policy.decide(state, moment(Moment.EMBEDDED, [1], frequency=frequency))[1]
    tables = cold_tables(np.full(LAYERS, EXPERTS), EXPERTS)
    tables = tables._replace(
        owner=np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1)),
        last_used=rng.integers(0, 90, (LAYERS, EXPERTS)).astype(np.int32),
        clock=np.full(LAYERS, 100, np.int32),
        frequency=frequency,
        prior=decision.prior,
        victim_weights=np.array(policy.victim_weights, np.int32),
    )
    order = np.argsort(PROBABILITIES[1, 0].astype(np.float64) * (frequency[0] + (not printed)))
    assert [owner for _, owner in rank_cells(tables, 0, 0)] == order.tolist()


@pytest.mark.parametrize("printed", [False, True])
def test_as_printed_one_use_counts_as_one(printed):
    """0.7 · 1 is less than 0.1 · 9, and 0.7 · 2 is more than 0.1 · 10."""
    seen: Any = SimpleNamespace(frequency=np.array([[1, 9]], np.int32))
    policy, likely = ExpertMap(printed=printed), np.array([[0.7, 0.1]], np.float32)
    prior = policy._prior(expert_map.prior_of(likely), seen)
    key = victim_key(np.int32(1), seen.frequency, prior, policy.victim_weights)[0]
    assert (key[0] < key[1]) == printed


def test_refusals(trace, told, tmp_path):
    for wrong, match in (
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"distance": 0}, r"distance must lie in 1…3, not 0"),
        ({"distance": LAYERS}, r"distance must lie in 1…3, not 4"),
    ):
        with pytest.raises(ValueError, match=match):
            ExpertMap(**wrong).init(told)
    with pytest.raises(TraceError, match=r"--trace DIR,arrays=probs\+embedding"):
        expert_map.fit(trace_of_kinds(tmp_path, [[0]], probabilities=False, embedding=0))
    policy = expert_map.fit(trace, capacity=99, distance=2)
    with pytest.raises(ValueError, match="80 maps are given and capacity is 4"):
        dataclasses.replace(policy, capacity=4).init(told)
    with pytest.raises(ValueError, match="fitted to a model with layers 4, this one has 6"):
        policy.init(dataclasses.replace(told, layers=6))


def test_the_maps_know_what_repeats(told, tmp_path):
    """Property 3 with a cache: with the trace's maps and room, no layer misses; the cells hold what
    is wanted and no more. (Kinds 1 and 3 have one first layer.)"""
    rng = np.random.default_rng(1)
    kinds = [[int(rng.integers(3)), int(rng.integers(4, 6))] for _ in range(40)]
    policy = expert_map.fit(trace := trace_of_kinds(tmp_path, kinds), distance=2)
    run: dict[str, Any] = dict(cells=TOP_K * 2, driver="host", spec=told)
    assert not simulate(trace, policies=[policy], **run).misses.any()


def test_predicted_times_profile_the_distance(told, tmp_path):
    """Section 6.1: an expert of the last layer crosses the link while two layers are computed, so
    one layer ahead is too late, and three are no better than two."""
    trace = trace_of_kinds(tmp_path, [[0], [3]] * 8)
    costs = dataclasses.replace(MODEL, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    run: dict[str, Any] = dict(cells=[EXPERTS] * 3 + [TOP_K], driver="host", spec=told)
    seconds = []
    for distance in (1, 2, 3):
        policy = dataclasses.replace(expert_map.fit(trace, distance=distance), pool=False)
        found = predict(trace, costs, policies=[policy], link=Link(rate=0.15), **run)
        seconds.append(float(found.seconds[4:].mean()))
    assert seconds[0] > seconds[1] + 100 and abs(seconds[2] - seconds[1]) < 50


# ---- offline and online


def test_offline_fills_the_store_with_a_share_of_the_requests(trace, told, tmp_path):
    """Of two requests the first, and nothing is added while it runs; online adds."""
    half = expert_map.fit(trace, distance=2, share=0.5)
    assert half.fitted is not None and len(half.fitted.arrays["maps"]) == 40
    for kind in range(KINDS):
        is_there = any(
            np.allclose(one, PROBABILITIES[kind].astype(np.float32), atol=1e-3)
            for one in half.fitted.arrays["maps"]
        )
        assert is_there == (kind < 3)
    state = walk_kinds(half, half.init(told), [5])[1]
    assert state.matcher.store.size == 40
    online = dataclasses.replace(half, learns=True)
    assert walk_kinds(online, online.init(told), [5])[1].matcher.store.size == 41
    half.fitted.write(tmp_path / "half")
    again: Any = PREFETCH.parse(f"expert_map={tmp_path / 'half'}")
    assert not again.learns and again.distance == 2


def test_what_cannot_be_fitted_is_refused(trace, tmp_path):
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"share must lie in \(0, 1\], not"):
            expert_map.fit(trace, distance=2, share=share)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        expert_map.fit(trace, distance=2, capacity=0)
    nameless = trace_of_kinds(tmp_path, [[0]] * 2, absent=("token.request",))
    with pytest.raises(TraceError, match=r"has no token\.request: it was"):
        expert_map.fit(nameless, distance=2, share=0.5)


def test_memory_of_a_store_counts_before_it_is_full(trace, told):
    row = KINDS + LAYERS * EXPERTS + LAYERS
    online = ExpertMap(capacity=50)
    assert online.memory(told) == 50 * row * 4
    fitted = expert_map.fit(trace, capacity=50, distance=2)
    assert fitted.fitted is not None and fitted.memory(told) == fitted.fitted.nbytes
    assert dataclasses.replace(fitted, learns=True).memory(told) == 50 * row * 4
    full = walk_kinds(online, online.init(told), [0] * 50)[1]
    said = online.stats(full)
    assert said["learned_bytes"] == 50 * row * 4 and said["maps"] == 50
    # What the paper says is needed; every step here repeats one kind, whose map is there.
    count = LAYERS * EXPERTS
    assert said["maps_for"] == {"75%": 2 * count, "98%": math.ceil(count / 2 * math.log(count))}
    again = walk_kinds(online, full, [0])[1]
    assert online.stats(again)["similarity"] == pytest.approx(1, abs=1e-3)
    other = online.stats(walk_kinds(online, again, [5])[1])
    assert other["similarity"] < 0.99
    assert learned_bytes([RandomPrefetch(), online], told) == 50 * row * 4
    assert learned_bytes([MoEInfinity(capacity=3)], told) == 3 * LAYERS * EXPERTS * 4


# ---- beside inference


class Held:
    """Keeps a matcher's thread busy until it is let go."""

    def __init__(self, matcher: AsynchronousMatcher):
        self._go = threading.Event()
        matcher._thread.submit(self._go.wait, 3.0)  # a caller that waits fails, and does not hang

    def let_go(self, matcher: AsynchronousMatcher) -> None:
        self._go.set()
        matcher.wait()


def asynchronous(trace: Trace, **given: Any) -> ExpertMap:
    policy = expert_map.fit(trace, distance=2)
    return dataclasses.replace(policy, asynchronous=True, **given)


def test_inference_waits_for_no_search_and_a_late_one_is_counted(trace, told):
    policy = asynchronous(trace)
    state: Any = policy.init(told)
    held = Held(state.matcher)
    # The thread is held, and every moment returns, wanting nothing.
    found, state = walk_kinds(policy, state, [4])
    assert found == [[]] * (LAYERS + 1) and policy.stats(state)["late"] == 0
    held.let_go(state.matcher)
    # Found now: of a step that has ended. And the next step has what comes in time.
    state, decision = policy.decide(state, moment(Moment.EMBEDDED, [4], step=1))
    state.matcher.wait()
    late = policy.stats(state)["late"]
    assert late >= LAYERS - 1  # the embedding's, and all but the last two routers'
    state, decision = policy.decide(state, moment(Moment.ROUTED, [4], 0, 1))
    assert set(wanted(decision)) == experts(1, 4)  # layer 0 is too late
    assert policy.stats(state)["late"] == late + 1
    state.matcher.wait()
    state, decision = policy.decide(state, moment(Moment.ROUTED, [4], 1, 1))
    assert set(wanted(decision)) == experts(2, 4)
    assert policy.stats(state)["searches"] == LAYERS + 1 + 3


def test_searches_beside_inference_take_none_of_its_process(told):
    """A thread would: NumPy's calls for a search hold the interpreter's lock between products."""
    rng = np.random.default_rng(0)
    maps = rng.random((LAYERS, 20_000, EXPERTS), np.float32)
    store = store_rows(rng.random((20_000, 256), np.float32), maps.swapaxes(0, 1))
    begun = MapMatcher(store, store.trajectory(0), 20_000, 2, False)
    rows = rng.random((4, 256), np.float32)
    searches = [Published(Moment.EMBEDDED, step, -1, rows, None) for step in range(12)]
    used = -time.process_time()
    want = [begun.see(seen)[1] for seen in searches]
    used += time.process_time()
    matcher = AsynchronousMatcher(begun)
    matcher.wait()
    beside, found = -time.process_time(), []
    for seen in searches:
        matcher.publish(seen)  # pyright: ignore[reportArgumentType]  the fields that it reads
        matcher.wait()
        found += matcher.take_found()
    beside += time.process_time()
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.step == other.step and np.array_equal(one.likely, other.likely)
    assert beside < used / 3
    process = matcher._process
    # A child has the process's input open, as a forked one would: its end is not waited for.
    assert process.stdin is not None
    with subprocess.Popen(["sleep", "30"], pass_fds=[process.stdin.fileno()]) as child:
        began = time.monotonic()
        del matcher
        gc.collect()
        assert process.returncode is not None and time.monotonic() - began < 10
        child.kill()


def test_a_search_that_fails_beside_inference_says_so(trace, told, caplog):
    matcher = asynchronous(trace).init(told).matcher
    assert isinstance(matcher, AsynchronousMatcher)
    matcher.publish(dataclasses.replace(moment(Moment.EMBEDDED, [4]), embedding=None))
    matcher.wait()
    with pytest.raises(TypeError, match="NoneType"):
        matcher.take_found()
    # A process that is killed fails no step: another one searches, at last none.
    for end in range(RESTARTS + 1):
        matcher._process.kill()
        for step in (2 * end + 1, 2 * end + 2):
            matcher.publish(moment(Moment.EMBEDDED, [4], step=step))
            matcher.wait()
        found = [prediction.step for prediction in matcher.take_found()]
        assert found == ([2 * end + 2] if end < RESTARTS else [])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == RESTARTS + 1 and "ended with status -9; another one begins" in said[0]
    assert "no more experts are prefetched" in said[-1]
    assert matcher.ends == RESTARTS + 1 and matcher.left_out == RESTARTS + 2


def test_decisions_of_a_run_beside_inference_are_taken_again(trace, told, tmp_path):
    """Through the controller: whatever came in time in the run, the same is decided again."""
    policy = dataclasses.replace(asynchronous(trace), pool=False)  # this device has no pool
    events: list = []
    device = LayeredDevice(Controller(told, [policy], listener=events.append), 4)
    device.run(trace)
    decided = tuple((e.step, e.moment, e.decision) for e in events if hasattr(e, "decision"))
    assert len(decided) == 40 * (LAYERS + 1)  # each is in the trace, wanted or not
    again = RecordedPolicy("ExpertMap", "run", decided, policy.victim_weights)
    found: list = []
    other = LayeredDevice(Controller(told, [again], listener=found.append), 4)
    other.run(trace)
    assert list(map(repr, found)) == list(map(repr, events))
    np.testing.assert_array_equal(other.missed, device.missed)
    said = device.control.controller.stats()["said"]["ExpertMap"]
    assert said["searches"] == 40 * (LAYERS + 1)
    with pytest.raises(TraceError, match="no decision of ExpertMap at ROUTED of step 0, layer 0"):
        again.decide(again.init(told), moment(Moment.ROUTED, [0], 0))
    sometimes = SimpleNamespace(pool=True, pools=lambda state: False)
    with pytest.raises(TraceError, match="pools cells in some steps"):
        repeat_run(trace, sometimes)
    with pytest.raises(TraceError, match="has no decisions of ExpertMap"):
        repeat_run(trace, policy)
