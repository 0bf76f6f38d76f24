"""Code between layers that is written for speed decides as its straightforward form."""

from __future__ import annotations

import pickle
import platform
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.interface import Moment, Observation
from host_offload.policies.eviction.arc import Directory
from host_offload.policies.prefetch import llapor
from host_offload.policies.prefetch.expert_map.expert_map_policy import ExpertMap
from host_offload.policies.prefetch.expert_map.map_store import store_rows
from host_offload.policies.prefetch.fitted import LayerArrays
from host_offload.policies.prefetch.moe_infinity import (
    MoEInfinity,
    popular_experts,
    row_lengths,
    shares,
    similarity,
)
from host_offload.policies.prefetch.next_layers import (
    HALVES_TO_WIDEN,
    ON_THIS_THREAD,
    apply_linear,
    multiply_rows,
    rank_chosen,
)
from pallas_kernels.cpu import rows as native_rows
from pallas_kernels.cpu import wanted as native_wanted
from pallas_kernels.cpu.library import address_of, why_not_cpu
from pallas_kernels.cpu.rows import FORMS
from tests.host_offload.control.policy_runs import spec


class Plain(NamedTuple):
    """ARC one reference at a time, as Figure 4 prints it."""

    once: tuple[int, ...] = ()
    often: tuple[int, ...] = ()
    gone_once: tuple[int, ...] = ()
    gone_often: tuple[int, ...] = ()
    aim: float = 0.0

    def reference(self, expert: int, cells: int) -> Plain:
        now, gone, was_often = self._trim(cells), False, False
        if expert in now.once or expert in now.often:
            now = now._replace(once=_without(now.once, expert))
            return now._replace(often=(*_without(now.often, expert), expert))
        sizes = len(now.gone_once), len(now.gone_often)
        if expert in now.gone_once:
            gone, aim = True, min(float(cells), now.aim + max(1.0, sizes[1] / sizes[0]))
            now = now._replace(aim=aim, gone_once=_without(now.gone_once, expert))
        elif expert in now.gone_often:
            gone = was_often = True
            aim = max(0.0, now.aim - max(1.0, sizes[0] / sizes[1]))
            now = now._replace(aim=aim, gone_often=_without(now.gone_often, expert))
        if len(now.once) + len(now.often) == cells:
            now = now._evict(was_often=was_often)
        if gone:
            return now._replace(often=(*now.often, expert))
        return now._replace(once=(*now.once, expert))._trim(cells)

    def _evict(self, *, was_often: bool = False) -> Plain:
        held = len(self.once)
        from_once = held and (held > self.aim or (was_often and held == self.aim))
        if from_once or not self.often:
            gone = (*self.gone_once, self.once[0])
            return self._replace(once=self.once[1:], gone_once=gone)
        gone = (*self.gone_often, self.often[0])
        return self._replace(often=self.often[1:], gone_often=gone)

    def _trim(self, cells: int) -> Plain:
        now, held = self, len(self.once) + len(self.often)
        gone = len(self.gone_once) + len(self.gone_often)
        few = held <= cells and len(self.once) + len(self.gone_once) <= cells
        if few and held + gone <= 2 * cells and self.aim <= cells:
            return self
        while len(now.once) + len(now.often) > cells:
            now = now._evict()
        gone_once = now.gone_once[max(len(now.once) + len(now.gone_once) - cells, 0) :]
        rest = 2 * cells - len(now.once) - len(now.often) - len(gone_once)
        gone_often = now.gone_often[max(len(now.gone_often) - rest, 0) :]
        aim = min(now.aim, float(cells))
        return now._replace(gone_once=gone_once, gone_often=gone_often, aim=aim)


def _without(experts: tuple[int, ...], expert: int) -> tuple[int, ...]:
    return tuple(e for e in experts if e != expert)


SCORES = st.lists(st.integers(-3, 3), min_size=6, max_size=6)


LAYER = st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), max_size=8))


@given(st.lists(LAYER, max_size=12))
def test_arc_references_a_layer_as_one_expert_after_the_other(layers):
    plain, directory = Plain(), Directory()
    for cells, experts in layers:
        for expert in experts:
            plain = plain.reference(expert, cells)
        directory = directory.reference(experts, cells)
        assert tuple(directory) == tuple(plain)
    order = []
    while plain.once or plain.often:
        after = plain._evict()
        order += {*plain.once, *plain.often} - {*after.once, *after.often}
        plain = after
    assert directory.order() == tuple(order)


@given(SCORES, st.integers(1, 6))
def test_the_chosen_of_one_row_are_those_of_the_row_twice(scores, k):
    row = np.array([scores], np.float32)
    assert rank_chosen(row, k) == rank_chosen(np.concatenate([row, row]), k)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 320, 130), (65, 512, 513), (64, 9, 2)])
def test_products_of_more_rows_stay_on_this_thread(monkeypatch, rows, inputs, outputs):
    """No part is larger than what OpenBLAS computes on the thread that asks, nor a vector's."""
    rng, parts, shortest = np.random.default_rng(0), [], []
    x, weights = rng.standard_normal((rows, inputs)), rng.standard_normal((inputs, outputs))
    plain = np.matmul

    def watched(a, b, **kwargs):
        parts.append(a.shape[0] * b.size)
        shortest.append(min(a.shape[0], b.shape[1]))
        return plain(a, b, **kwargs)

    monkeypatch.setattr(np, "matmul", watched)
    np.testing.assert_allclose(multiply_rows(x, weights), x @ weights, atol=1e-9)
    assert max(parts) <= ON_THIS_THREAD and sum(parts) == x.size * outputs
    assert min(shortest) > 1


def test_float16_weights_are_summed_in_float32():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((300, 70)).astype(np.float16)
    for count in (8, HALVES_TO_WIDEN + 1):
        rows = rng.standard_normal((count, 300), np.float32)
        found = multiply_rows(rows, weights)
        assert found.dtype == np.float32
        expected = rows.astype(np.float64) @ weights.astype(np.float64)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_few_rows_are_multiplied_alike_in_any_order(count, seed):
    rng = np.random.default_rng(seed)
    rows, weights = (rng.standard_normal(shape, np.float32) for shape in ((count, 40), (40, 24)))
    order, product = rng.permutation(count), multiply_rows(rows, weights)
    np.testing.assert_allclose(product, rows @ weights, rtol=1e-4, atol=1e-4)
    assert np.array_equal(multiply_rows(rows[order], weights), product[order])


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("inner", "columns"), [(320, 512), (7, 13), (1, 9), (352, 32)])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_native_products_of_few_rows_have_numpys_bits(monkeypatch, count, inner, columns, kind):
    """float16 down to its denormals."""
    rng = np.random.default_rng(count)
    rows, weights = rng.standard_normal((count, 2 * inner)), rng.standard_normal((inner, columns))
    rows, weights = rows.astype(np.float32)[:, ::2], weights * 10.0 ** rng.integers(-6, 3, columns)
    weights = weights.astype(kind)
    weights.flags.writeable = False
    assert not why_not_cpu()
    found = multiply_rows(rows, weights)
    monkeypatch.setattr(native_rows, "bind", lambda *_: None)
    np.testing.assert_allclose(found, multiply_rows(rows, weights), rtol=1e-5, atol=1e-5)
    if platform.machine() == "x86_64":  # elsewhere einsum fuses multiplications and sums
        assert np.array_equal(found, multiply_rows(rows, weights))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("form", FORMS)
def test_native_layers_of_networks_are_numpys(monkeypatch, form, kind):
    """Rows of weights that are multiplied by zero are not read, and may hold anything."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2, 90), np.float32)
    rows[:, ::3] = 0
    weights = rng.standard_normal((90, 70), np.float32).astype(kind)
    bias = np.linspace(-50, 50, 70, dtype=np.float32)
    found = apply_linear(rows, weights, bias, form)
    unread = np.where(rows.any(axis=0)[:, None], weights, np.nan).astype(kind)
    assert np.array_equal(apply_linear(rows, unread, bias, form), found)
    monkeypatch.setattr(native_rows, "bind", lambda *_: None)
    plain = apply_linear(rows, weights, bias, form)
    np.testing.assert_allclose(found, plain, rtol=2e-6, atol=2e-6 * np.abs(plain).max())


def test_native_searches_of_maps_find_what_numpy_finds(monkeypatch):
    """Also with empty places and equal maps, of which the first is nearest."""
    rng = np.random.default_rng(2)
    maps = rng.dirichlet(np.full(11, 0.2), (40, 5)).astype(np.float32)
    embeddings = rng.standard_normal((40, 19), np.float32)
    maps[30], embeddings[30] = maps[7], embeddings[7]
    store = store_rows(embeddings, maps)
    store.lengths[0, ::9] = 0
    seen = [7, 9, 12, 30]

    def search():
        found, trajectory = [store.nearest_embedding(embeddings[seen])], store.trajectory(4)
        for layer in range(5):
            trajectory, one = store.nearest_map(trajectory, layer, maps[seen, layer])
            found += [one, trajectory]
        return found

    native = search()
    monkeypatch.setattr(native_rows, "bind", lambda *_: None)
    for mine, plain in zip(native, search(), strict=True):
        for a, b in zip(mine, plain, strict=True):
            np.testing.assert_array_equal(a, b)
    assert native[0].place[1] != 9 and native[0].place[[0, 2, 3]].tolist() == [7, 12, 7]


def layer_of(shape, deep, seed=0):
    """Arrays of a network of LLaPor, float16 as halve makes them. shape: D, q, H, E."""
    inputs, components, width, experts = shape
    rng = np.random.default_rng(seed)
    drawn = llapor.LayerTask(deep, width).draw_weights(components, experts, rng)
    around = {
        "mean": rng.standard_normal(inputs, np.float32),
        "basis": rng.standard_normal((inputs, components), np.float32),
        "balance": np.ones(experts, np.float32),
    }
    return LayerArrays(llapor.halve(around | {n: np.asarray(a) for n, a in drawn.items()}))


def test_addresses_are_those_of_the_data():
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    for each in (array, array[1:, ::2], array[:0], np.zeros(())):
        assert address_of(each) == each.ctypes.data


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_native_network_says_what_its_layers_say_one_by_one(deep, rows):
    """Also of infinite inputs, and pickled, without addresses of this process."""
    own, rng = layer_of((40, 24, 16, 11), deep), np.random.default_rng(1)
    own = pickle.loads(pickle.dumps((own.network, own)[1]))
    gate_input = (20 * rng.standard_normal((rows, 1, 40))).astype(np.float16)
    gate_input[0, 0, 3] = -np.inf
    ids = rng.permuted(np.tile(np.arange(11, dtype=np.int16), (rows, 1)), axis=1)[:, None, :3]
    weights = rng.random((rows, 1, 3), np.float32)
    seen = Observation(
        *(Moment.ROUTED, 0, 0, 0, -1, 0, 0.0), gate_input=gate_input, ids=ids, weights=weights
    )
    policy = llapor.Learned(None)  # pyright: ignore[reportArgumentType]  its arrays are given
    plain, network = policy.scores(own, seen), own.network
    assert network is not None
    scores, best = network(gate_input, ids, weights, 4)
    assert np.array_equal(scores, plain)
    assert best == (rank_chosen(plain, 4) if rows == 1 else [])
    assert policy.best(own, seen, False, 4) == rank_chosen(plain, 4)
    own["output"][:, 5], own["output"][:, 2] = own["output"][:, 9], own["output"][:, 9]
    own["output_bias"][[2, 5]] = own["output_bias"][9] = 1e9
    assert network(gate_input, ids, weights, 3)[1] == ([2, 5, 9] if rows == 1 else [])


def test_arrays_of_other_forms_have_no_native_network():
    own = layer_of((40, 24, 16, 11), deep=True)
    wrong = (
        {"inner1": own["inner1"].astype(np.float32)},
        {"gate": own["gate"][:-1]},
        {"input": np.asfortranarray(own["input"])},
        {"mean": own["mean"].astype(np.float64)},
    )
    for other in wrong:
        assert LayerArrays(own | other).network is None
    assert LayerArrays().network is None and LayerArrays(own).network is not None


@pytest.mark.parametrize("printed", [False, True])
def test_native_queues_of_expert_maps_are_numpys(monkeypatch, printed):
    """Steps of several rows and of none, over a store that fills and then replaces its maps."""
    layers, experts, hidden, rng = 5, 12, 9, np.random.default_rng(3)
    policy = ExpertMap(capacity=9, distance=2, printed=printed)
    told = spec(layers=layers, experts=experts, top_k=3, hidden=hidden)
    frequency = rng.integers(0, 9, (layers, experts)).astype(np.int32)

    def seen(moment, step, layer, embedding, probs):
        return Observation(
            *(moment, step, 0, 0, -1, layer, 0.0),
            embedding=embedding,
            probs=probs,
            frequency=frequency,
        )

    steps = []
    for count in (1, 4, 3, 0, 1, 2, 5, 1, 1):
        embedding = rng.standard_normal((count, hidden)).astype(np.float16)
        probs = rng.dirichlet(np.full(experts, 0.3), (count, layers)).astype(np.float16)
        probs[:, 1, 4] = probs[:, 1, 7]  # equal ones
        steps.append((embedding, probs))

    def run():
        state, decisions = policy.init(told), []
        for step, (embedding, probs) in enumerate(steps):
            asked = [(Moment.EMBEDDED, -1, None)]
            asked += [(Moment.ROUTED, x, probs[:, x : x + 1]) for x in range(layers)]
            for moment, layer, its_probs in [*asked, (Moment.STEP_END, -1, probs)]:
                before = pickle.dumps(state)
                after, decision = policy.decide(
                    state, seen(moment, step, layer, embedding, its_probs)
                )
                assert pickle.dumps(state) == before
                state = after
                decisions.append(decision)
        return state, decisions

    state, native = run()
    monkeypatch.setattr(native_rows, "bind", lambda *_: None)
    monkeypatch.setattr(native_wanted, "bind", lambda *_: None)
    other, plain = run()
    for mine, its in zip(native, plain, strict=True):
        assert mine.stages == its.stages
        if mine.stages:
            assert np.array_equal(mine.stages.columns, its.stages.columns)
        assert np.array_equal(mine.prior, its.prior)
    assert sum(len(one.stages or ()) for one in native) > 200
    for a, b in zip(state[1:], other[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_known_lengths_change_no_similarity():
    rng = np.random.default_rng(0)
    collection = rng.random((5, 3, 4), np.float32)
    collection[2, 1] = 0
    found = similarity(collection, collection[2], row_lengths(collection))
    assert found.tolist() == similarity(collection, collection[2]).tolist()


@pytest.mark.parametrize("native", [False, True])
def test_moe_infinity_finds_what_it_finds_with_whole_matrices(monkeypatch, native):
    """Steps of several sequences, some with several tokens, while sequences end and replace the
    least used matrices of a full collection."""
    assert not why_not_cpu()
    if not native:
        monkeypatch.setattr(native_wanted, "bind", lambda *_: None)
    layers, experts, rng = 5, 12, np.random.default_rng(1)
    policy = MoEInfinity(capacity=4, limit=30, first=2)
    state = policy.init(spec(layers=layers, experts=experts, top_k=3))
    matrices: dict[int, np.ndarray] = {}
    used: list[int] = []

    def wanted(likely, now):
        ahead = np.arange(layers)[:, None] - now
        urgent = np.where(ahead > 0, likely * (1 - ahead / (layers + 1)), 0)
        places = [(-urgent[place], *place) for place in np.ndindex(urgent.shape) if urgent[place]]
        return [place for _, *place in sorted(places)[:30]]

    for step in range(60):
        running = [step // 4, step // 4 + 7, step // 4 + 2][: 1 + step % 3]
        request = rng.permutation([*running, *running[: step % 2]])
        begun = policy.decide(state, Observation(Moment.EMBEDDED, step, 0, 0, -1, -1, 0.0))[
            1
        ].stages
        expected = wanted(popular_experts(state.collection, 2, 3), -1)
        assert [[s.layer, s.expert] for s in begun] == expected
        for layer in range(layers):
            ids = rng.permuted(np.tile(np.arange(experts), (len(request), 1)), axis=1)[:, None, :3]
            seen = Observation(
                *(Moment.ROUTED, step, 0, 0, -1, layer, 0.0), request=request, ids=ids
            )
            predicted = np.zeros((layers, experts))
            for one in np.unique(request).tolist():
                matrix = matrices.setdefault(one, np.zeros((layers, experts), np.int32))
                np.add.at(matrix[layer], ids[request == one].ravel(), 1)
                if len(state.collection):
                    nearest = int(np.argmax(similarity(state.collection, shares(matrix))))
                    used[nearest] += 1
                    predicted += state.collection[nearest]
            state, decision = policy.decide(state, seen)
            assert [[s.layer, s.expert] for s in decision.stages] == wanted(predicted, layer)
            assert state.used.tolist() == used
        if step % 2:
            ended = min(matrices)
            seen = Observation(Moment.TURN_END, step, 0, 0, ended, -1, 0.0)
            state, _ = policy.decide(state, seen)
            new = shares(matrices.pop(ended))
            place = len(used) if len(used) < 4 else int(np.argmin(used))
            used[place : place + 1] = [1]
            assert np.array_equal(state.collection[place], new)
    assert len(used) == 4
