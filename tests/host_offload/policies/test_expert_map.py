"""fMoE's expert maps: searches, selection and replacement as plain enumeration says, and the policy
over them (checkable properties of the paper: ../shared/papers.md, 4.7)."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.interface import Moment, Observation, Spec
from host_offload.control.staging import choose_cell
from host_offload.memory.tables import cold_tables
from host_offload.policies.prefetch.expert_map import policy as expert_map
from host_offload.policies.prefetch.expert_map.policy import ExpertMap, Matching
from host_offload.policies.prefetch.expert_map.store import (
    MapStore,
    Trajectory,
    dot_products,
    empty_store,
    selected,
    semantic_scores,
    stored,
    with_rows,
)
from host_offload.policies.prefetch.names import FIT, prefetch_policy
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.writer import TraceWriter
from tests.host_offload.traces.traces_of import write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

L, E, D, K = 5, 8, 6, 2


def draw(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [rows, D] and maps [rows, L, E], the latter few-peaked as a router's."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, D)), rng.dirichlet(np.full(E, 0.4), (rows, L))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / (np.linalg.norm(a) * np.linalg.norm(b)))


# ---- searches


def test_searches_are_cosines_layer_by_layer():
    store, (embeddings, maps) = stored(*draw(0, 7)), draw(1, 3)
    old_embeddings, old_maps = draw(0, 7)
    scores, trajectory = semantic_scores(store, embeddings), Trajectory.of(store, 3)
    for x, y in itertools.product(range(3), range(7)):
        assert scores[x, y] == pytest.approx(cosine(embeddings[x], old_embeddings[y]), abs=1e-6)
    for layer in range(L):
        trajectory = trajectory.after(store, layer, maps[:, layer])
        scores, first = trajectory.scores(store, layer), slice(layer + 1)
        for x, y in itertools.product(range(3), range(7)):
            wanted = cosine(maps[x, first], old_maps[y, first])
            assert scores[x, y] == pytest.approx(wanted, abs=1e-6)


class Watched(np.ndarray):
    """Notes the multiplications of each product that BLAS is asked for."""

    asked: ClassVar[list[int]] = []

    def __array_ufunc__(self, ufunc, method, *inputs, **settings):
        plain = [np.asarray(each) for each in inputs]
        if ufunc is np.matmul:
            self.asked.append(plain[0].shape[-2] * plain[0].shape[-1] * plain[1].shape[-1])
        return getattr(ufunc, method)(*plain, **settings)


@pytest.mark.parametrize("length", [1, 300, 2048])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 1000), (31, 130), (33, 129), (70, 0)])
def test_products_are_those_of_one_thread(rows, count, length):
    """fMoE: inference never waits for a search, so none waits for another thread of BLAS."""
    rng = np.random.default_rng(rows)
    new, kept = (rng.normal(size=(n, length)).astype(np.float32) for n in (rows, count))
    Watched.asked.clear()
    found = dot_products(new, kept.view(Watched))
    np.testing.assert_allclose(found, new.astype(float) @ kept.T, rtol=1e-4, atol=1e-4)
    assert found.dtype == np.float32 and max(Watched.asked) <= 65536 * 4


def test_sigmoid_scores_become_distributions():
    embeddings, maps = draw(0, 4)
    factors = np.random.default_rng(1).uniform(0.5, 3, (4, L, 1))
    plain, scaled = stored(embeddings, maps), stored(embeddings, maps * factors)
    np.testing.assert_allclose(scaled.maps, plain.maps, rtol=1e-6)
    one = Trajectory.of(plain, 4).after(plain, 0, maps[:, 0])
    other = Trajectory.of(plain, 4).after(plain, 0, (maps * factors)[:, 0])
    np.testing.assert_allclose(one.scores(plain, 0), other.scores(plain, 0), rtol=1e-5)


def test_what_has_no_direction_is_like_nothing():
    store = stored(np.zeros((1, D)), np.zeros((1, L, E)))
    assert semantic_scores(store, np.ones((1, D))).tolist() == [[0]]
    trajectory = Trajectory.of(store, 1).after(store, 0, np.full((1, E), 1 / E))
    assert trajectory.scores(store, 0).tolist() == [[0]]


# ---- selection


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-1, 1), st.integers(1, E))
def test_selection_is_the_smallest_set_that_there_is(seed, score, top_k):
    p = np.random.default_rng(seed).dirichlet(np.full(E, 0.5)).astype(np.float32)
    chosen = selected(p[None], np.array([score], np.float32), top_k)[0]
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


def test_the_less_alike_the_more_is_selected():
    maps = draw(3, 20)[1].reshape(-1, E).astype(np.float32)
    sizes = [
        selected(maps, np.full(len(maps), score), K).sum(axis=1)
        for score in (1.0, 0.7, 0.4, 0.1, 0.0, -0.5)
    ]
    assert (sizes[0] == K).all()
    assert all((more >= fewer).all() for fewer, more in itertools.pairwise(sizes))
    assert (sizes[3] > K).any()
    np.testing.assert_array_equal(sizes[-1], sizes[-2])  # clipped: never more than all
    assert (selected(maps, np.zeros(len(maps)), K, by_similarity=False).sum(axis=1) == K).all()


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
    wanted = stored(*(np.array([row[i] for row in rows]) for i in range(2)))
    for got, want in zip(store, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("distance", [1, 3])
def test_rows_replace_who_they_make_redundant(distance):
    store, rows = empty_store(L, E, D), []
    for seed, count in enumerate((3, 4, 1, 0, 6, 2, 9)):
        embeddings, maps = draw(seed, count)
        before = [array.copy() for array in store]
        new = with_rows(store, embeddings, maps, capacity=6, distance=distance)
        for array, was in zip(store, before, strict=True):
            np.testing.assert_array_equal(array, was)  # a policy's state is never changed
        store = new
        rows = plain_with_rows(rows, list(zip(embeddings, maps, strict=True)), 6, distance)
        assert store.size == min(len(rows), 6)
        same_store(store, rows)


def test_a_duplicate_replaces_itself():
    embeddings, maps = draw(0, 6)
    store = stored(embeddings, maps)
    again = with_rows(store, embeddings[2:3], maps[2:3], capacity=6, distance=3)
    for got, want in zip(again, store, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


# ---- the policy


def of_moment(moment: Moment, rows: int, layer: int = -1, **fields: Any) -> Observation:
    known = {"request": np.arange(rows), "phase": np.ones(rows, np.uint8)}
    return Observation(moment, 0, 0, 0, -1, layer, 0.0, **{**known, **fields})


def spec(tmp_path: Path):
    trace = write_trace(tmp_path / "spec", [np.zeros((1, L, K), int)], E)
    header = dataclasses.replace(trace.header, spec={**trace.header.spec, "hidden": D})
    return dataclasses.replace(spec_of(header), driver="host")


def with_store(state: Any, store: MapStore) -> Matching:
    return state._replace(tracker=dataclasses.replace(state.tracker, store=store))


def begun(policy: ExpertMap, told: Spec, store: MapStore) -> Matching:
    """The policy's state with these maps."""
    return with_store(policy.init(told), store)


def store_of(state: Any) -> MapStore:
    return state.tracker.store


def walk(policy: ExpertMap, state: Matching, embeddings, maps, **rows: Any):
    """A step of these rows: (what was wanted at each moment from EMBEDDED on, the state after)."""
    count = len(embeddings)
    state, decision = policy.decide(
        state, of_moment(Moment.EMBEDDED, count, embedding=embeddings, **rows)
    )
    decisions = [decision]
    for layer in range(L):
        seen = of_moment(Moment.ROUTED, count, layer, probs=maps[:, layer : layer + 1], **rows)
        state, decision = policy.decide(state, seen)
        decisions.append(decision)
    end = of_moment(Moment.STEP_END, count, embedding=embeddings, probs=maps, **rows)
    return decisions, policy.decide(state, end)[0]


def wanted_of(decisions) -> list[list[tuple[int, int]]]:
    return [[(s.layer, s.expert) for s in d.stages or ()] for d in decisions]


def test_the_same_iteration_again_is_known(tmp_path):
    """Property 3: the trajectory's score is 1 and exactly what is routed is prefetched, the first
    layers by the embedding, each further one `distance` layers ahead."""
    embeddings, maps = draw(0, 4)
    policy, one = ExpertMap(distance=2), slice(1, 2)
    state = begun(policy, spec(tmp_path), stored(embeddings, maps))
    decisions, after = walk(policy, state, embeddings[one], maps[one])
    routed = [{(n, int(e)) for e in np.argsort(-maps[1, n])[:K]} for n in range(L)]
    wanted = wanted_of(decisions)
    assert set(wanted[0]) == routed[0] | routed[1]
    for layer in range(L):  # after the router of a layer: of those to come that were matched
        ahead = routed[layer + 1 : layer + 3]
        assert set(wanted[layer + 1]) == set().union(*ahead)
    assert after.tracker.trajectory.scores(store_of(state), L - 1)[0, 1] == pytest.approx(
        1, abs=1e-5
    )
    assert store_of(after).size == 5


def test_nearer_and_likelier_goes_first(tmp_path):
    """Property 5: the order after each layer is that of p / (l − l_now) computed from scratch."""
    policy = ExpertMap(distance=3)
    state = begun(policy, spec(tmp_path), stored(*draw(0, 5)))
    embeddings, maps = draw(7, 2)
    state, decision = policy.decide(state, of_moment(Moment.EMBEDDED, 2, embedding=embeddings))
    for layer in range(-1, L):
        if layer >= 0:
            seen = of_moment(Moment.ROUTED, 2, layer, probs=maps[:, layer : layer + 1])
            state, decision = policy.decide(state, seen)
        priority = {
            (n, e): state.wanted[n, e] / (n - layer)
            for n, e in np.ndindex(L, E)
            if n > layer and state.wanted[n, e]
        }
        (got,) = wanted_of([decision])
        assert got == sorted(priority, key=lambda place: (-priority[place], place))
        assert {n for n, _ in got} == {*range(layer + 1, min(max(layer, -1) + 4, L))}


def test_rows_are_united_and_their_probabilities_maxed(tmp_path):
    policy = ExpertMap(distance=1)
    embeddings, maps = draw(0, 3)
    state = begun(policy, spec(tmp_path), stored(embeddings, maps))
    seen = of_moment(Moment.EMBEDDED, 2, embedding=embeddings[:2])
    state, decision = policy.decide(state, seen)
    top = [{int(e) for e in np.argsort(-maps[row, 0])[:K]} for row in range(2)]
    assert {e for _, e in wanted_of([decision])[0]} == top[0] | top[1]
    np.testing.assert_allclose(state.likely[0], maps[:2, 0].max(axis=0), rtol=1e-6)
    assert np.all(state.likely[1:] == 1 / E), "nothing was predicted for them"


def test_evicted_is_the_least_probability_times_frequency(tmp_path):
    """Property 5 of eviction: the tables' victim under the policy's weights and prior; recency
    decides nothing."""
    rng = np.random.default_rng(2)
    policy = ExpertMap(distance=1)
    embeddings, maps = draw(0, 3)
    state = begun(policy, spec(tmp_path), stored(embeddings, maps))
    decision = policy.decide(state, of_moment(Moment.EMBEDDED, 1, embedding=embeddings[:1]))[1]
    tables = cold_tables(np.full(L, E), E)
    frequency = rng.integers(0, 50, (L, E)).astype(np.int32)
    tables = tables._replace(
        owner=np.tile(np.arange(E, dtype=np.int32), (L, 1)),
        last_used=rng.integers(0, 90, (L, E)).astype(np.int32),
        clock=np.full(L, 100, np.int32),
        frequency=frequency,
        prior=decision.prior,
        victim_weights=np.array(policy.victim_weights, np.int32),
    )
    kept: list[int] = []
    for expert in np.argsort(maps[0, 0] * (1 + frequency[0])):
        assert choose_cell(tables, 0, 0, taken=kept) == expert
        kept.append(int(expert))


def test_a_store_that_is_empty_asks_for_nothing_and_learns(tmp_path):
    policy = ExpertMap(distance=2, capacity=3)
    state = policy.init(spec(tmp_path))
    decisions, state = walk(policy, state, *draw(0, 2))
    assert wanted_of(decisions) == [[]] * (L + 1) and store_of(state).size == 2
    decisions, state = walk(policy, state, *draw(1, 2))
    assert wanted_of(decisions)[0] and store_of(state).size == 3


def test_a_step_asks_for_nothing_that_the_step_before_wanted(tmp_path):
    policy, told = ExpertMap(distance=2, tracker="map_t"), spec(tmp_path)
    store = stored(*draw(0, 4))
    first = begun(policy, told, store)
    after = with_store(walk(policy, first, *draw(5, 2))[1], store)
    assert after.wanted.any()
    runs = (wanted_of(walk(policy, state, *draw(6, 1))[0]) for state in (first, after))
    assert next(runs) == next(runs)


def test_the_ablations(tmp_path):
    """Map (T) predicts nothing for the first layers, Map (T+S) takes top-k; any distance."""
    embeddings, maps = draw(0, 4)
    store, step = stored(embeddings, maps), (-embeddings.sum(axis=0)[None], draw(9, 1)[1])
    told = spec(tmp_path)

    def run(**given: Any):
        policy = ExpertMap(**given)
        return wanted_of(walk(policy, begun(policy, told, store), *step)[0])

    whole, trajectory = run(distance=2), run(distance=2, tracker="map_t")
    assert whole[0] and not trajectory[0] and {n for n, _ in trajectory[1]} == {2}
    assert len(trajectory[1]) == K
    assert len(run(distance=2, tracker="map_ts")[0]) == 2 * K < len(whole[0])
    assert {n for n, _ in run(distance=4)[0]} == {0, 1, 2, 3}


def test_a_prompt_as_one_row(tmp_path):
    """prompt="mean": a row a request, of the mean embedding and map; generated tokens stay rows."""
    policy, told = ExpertMap(distance=1, prompt="mean"), spec(tmp_path)
    state = policy.init(told)
    embeddings, maps = draw(0, 5)
    prompt = {"request": np.array([3, 3, 3, 7, 7]), "phase": np.zeros(5, np.uint8)}
    state = walk(policy, state, embeddings, maps, **prompt)[1]
    parts = slice(0, 3), slice(3, 5)
    same_store(store_of(state), [(embeddings[p].mean(axis=0), maps[p].mean(axis=0)) for p in parts])
    assert walk(policy, state, embeddings, maps)[1].tracker.store.size == 7
    by_token = ExpertMap(distance=1)
    empty = by_token.init(told)
    assert walk(by_token, empty, embeddings, maps, **prompt)[1].tracker.store.size == 5


# ---- from a trace


def trace_of_maps(directory: Path, steps: int, *, arrays: bool = True) -> Trace:
    plain = write_trace(directory / "plain", [np.zeros((2, L, K), int)] * steps, E)
    given = {"probabilities": arrays, "embedding": D if arrays else 0}
    header = dataclasses.replace(plain.header, spec={**plain.header.spec, "hidden": D}, **given)
    with TraceWriter(directory / "maps", header) as writer:
        for step in plain.step_traces():
            embeddings, maps = (array.astype(np.float16) for array in draw(step.number, 2))
            if arrays:
                step = step._replace(embedding=embeddings, probabilities=maps)
            writer.append(step)
    return read_trace(directory / "maps")


def test_fit_takes_a_trace_as_the_engine_would_and_keeps_it_in_a_file(tmp_path):
    trace = trace_of_maps(tmp_path, 9)
    fit: Any = FIT["expert_map"]
    policy = fit(trace, capacity=7, distance=2)
    rows = []
    for number in range(9):
        pairs = zip(*(a.astype(np.float16) for a in draw(number, 2)), strict=True)
        rows = plain_with_rows(rows, [(e.astype(float), m.astype(float)) for e, m in pairs], 7, 2)
    told = spec(tmp_path)
    same_store(store_of(policy.init(told)), rows)
    policy.fitted.write(tmp_path / "maps.safetensors")
    again = prefetch_policy(f"expert_map={tmp_path / 'maps.safetensors'}")
    assert isinstance(again, ExpertMap) and (again.capacity, again.distance) == (7, 2)
    same_store(store_of(again.init(told)), rows)
    assert not policy.learns and not again.learns
    assert policy.fitted.nbytes == 7 * (D + L * E) * 4


def test_refusals(tmp_path):
    told = spec(tmp_path)
    for wrong, match in (
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"prompt": "words"}, "prompt one of tokens, mean"),
        ({"tracker": "T"}, "tracker one of map_tsd, map_ts, map_t, speculate, hit_count"),
        ({"distance": 0}, r"distance must lie in 1…4, not 0"),
        ({"distance": L}, r"distance must lie in 1…4, not 5"),
    ):
        with pytest.raises(ValueError, match=match):
            ExpertMap(**wrong).init(told)
    with pytest.raises(TraceError, match="--trace-arrays probs,embedding"):
        expert_map.fit(trace_of_maps(tmp_path, 1, arrays=False))
    (tmp_path / "more").mkdir()
    policy = expert_map.fit(trace_of_maps(tmp_path / "more", 4), capacity=5, distance=2)
    with pytest.raises(ValueError, match="5 maps are given and capacity is 4"):
        dataclasses.replace(policy, capacity=4).init(told)
    with pytest.raises(ValueError, match="fitted to a model with layers 5, this one has 6"):
        policy.init(dataclasses.replace(told, layers=6))
