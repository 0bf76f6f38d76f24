"""fMoE's rivals: each does what its own paper or public code says (docs/explanation/policies.md),
and mistakes that were once made here are seen."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import Moment, Observation, Spec, State
from host_offload.memory.pager import rank_cells
from host_offload.memory.tables import cold_tables
from host_offload.policies.eviction.arc import Directory
from host_offload.policies.prefetch import moe_infinity, promoe, training
from host_offload.policies.prefetch.fate import Fate
from host_offload.policies.prefetch.fitted import fit_of
from host_offload.policies.prefetch.mixtral_offloading import MixtralOffloading
from host_offload.policies.prefetch.moe_infinity import MoEInfinity
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.writer import TraceWriter
from tests.host_offload.policies.kinds import (
    EXPERTS,
    KINDS,
    LAYERS,
    QUICK,
    ROUTER,
    ROUTES,
    experts,
    routed,
    trace_of_kinds,
    wanted,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def with_state(seen: Observation, resident: list[tuple[int, int]]) -> Observation:
    state = np.full((LAYERS, EXPERTS), State.ABSENT, np.int8)
    for place in resident:
        state[place] = State.RESIDENT
    return dataclasses.replace(seen, state=state)


# ---- Mixtral-Offloading


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mixtral_offloading_wants_the_likeliest_of_the_next_layer(told, count):
    policy = MixtralOffloading(count=count)
    state = policy.init(told)
    best = np.argsort(-ROUTER[2, 4], kind="stable")[:count].tolist()
    _, decision = policy.decide(state, with_state(routed(1, [4]), []))
    assert wanted(decision) == [(2, e) for e in best]
    # Of several rows the probabilities are summed: two tokens of one kind outweigh another.
    _, decision = policy.decide(state, with_state(routed(1, [0, 4, 4]), []))
    assert wanted(decision)[0] == (2, best[0]) and len(wanted(decision)) == count
    _, decision = policy.decide(state, with_state(routed(LAYERS - 1, [4]), []))
    assert decision.stages == ()
    # A step without tokens says nothing.
    assert policy.decide(state, with_state(routed(0, []), []))[1].stages == ()
    with pytest.raises(ValueError, match=r"count must lie in 1…8, not 9"):
        MixtralOffloading(count=9).init(told)


def test_what_was_speculated_goes_before_whoever_was_used(told):
    """The paper's buffers: nobody of the cache makes room for them, and once it was used whoever
    lay there counts by recency."""
    policy, layer = MixtralOffloading(count=2), 2
    state, decision = policy.decide(policy.init(told), with_state(routed(layer - 1, [4]), []))
    first, second = (expert for _, expert in wanted(decision))
    tables = cold_tables(np.full(LAYERS, EXPERTS), EXPERTS)
    tables = tables._replace(victim_weights=np.array(policy.victim_weights, np.int32))
    tables.owner[layer], tables.clock[layer] = np.arange(EXPERTS), 99
    tables.last_used[layer] = np.where(np.isin(np.arange(EXPERTS), [first, second]), 90, 7)

    def order(prior: np.ndarray) -> list[int]:
        return [owner for _, owner in rank_cells(tables._replace(prior=prior), layer, 0)]

    others = [e for e in range(EXPERTS) if e not in (first, second)]
    assert decision.prior is not None
    assert order(decision.prior) == [*sorted((first, second)), *others]
    seen = with_state(routed(layer, [4]), [(layer, first), (layer, second)])
    seen = dataclasses.replace(seen, ids=np.array([[[first]]], np.int16))
    _, decision = policy.decide(state, seen)
    assert decision.prior is not None and order(decision.prior) == [second, *others, first]


# ---- Fate


def test_fate_wants_whom_every_row_chooses_by_the_next_gate(told):
    policy = Fate()
    state, cells = policy.init(told), np.full(LAYERS, 4)

    def seen(layer: int, kinds: list[int]) -> Observation:
        return dataclasses.replace(routed(layer, kinds), cells=cells)

    for kinds in ([1], [0, 3, 3], list(range(KINDS))):
        _, decision = policy.decide(state, seen(0, kinds))
        assert set(wanted(decision)) == experts(1, *kinds)
        rows = [sum(e in ROUTES[kind, 1] for kind in kinds) for _, e in wanted(decision)]
        assert rows == sorted(rows, reverse=True)
    assert policy.decide(state, seen(LAYERS - 1, [1]))[1].stages == ()
    # A step without tokens says nothing.
    assert policy.decide(state, seen(0, []))[1].stages == ()
    # What is beyond float16 gives a prediction too.
    infinite = np.where(np.eye(KINDS)[[1]][:, None] > 0, np.inf, 0)
    _, decision = policy.decide(state, dataclasses.replace(seen(0, [1]), gate_input=infinite))
    assert set(wanted(decision)) == experts(1, 1)


def test_fate_evicts_by_arc(told):
    """The victim of the tables is that of a directory that saw the same references; who was
    brought and never used goes before."""
    policy, rng = Fate(), np.random.default_rng(0)
    state, directory, layer = policy.init(told), Directory(), 1
    cells = np.full(LAYERS, 4)
    for _ in range(60):
        ids = np.sort(rng.choice(EXPERTS, 2, replace=False, p=np.arange(1, 9) / 36))
        seen = dataclasses.replace(
            routed(layer, [0]), ids=ids.reshape(1, 1, 2).astype(np.int16), cells=cells
        )
        state, decision = policy.decide(state, seen)
        for expert in ids.tolist():
            directory = directory.reference((expert,), 4)
        order = directory.order()
        assert sorted(order) == sorted((*directory.once, *directory.often)) and len(order) <= 4
        assert decision.prior is not None and not decision.prior[0].any()
        unknown = next(e for e in range(EXPERTS) if e not in order)
        owners = [*order, unknown]
        tables = cold_tables(np.full(LAYERS, len(owners)), EXPERTS)._replace(
            prior=decision.prior, victim_weights=np.array(policy.victim_weights, np.int32)
        )
        tables.owner[layer, : len(owners)] = owners
        tables.last_used[layer, : len(owners)] = rng.integers(0, 9, len(owners))
        taken: list[int] = []
        for expert in (unknown, *order):
            cell = next(c for c, _ in rank_cells(tables, layer, 0) if c not in taken)
            assert tables.owner[layer, cell] == expert
            taken.append(cell)


def test_arc_keeps_what_is_used_again_from_a_scan():
    directory = Directory()
    for expert in (1, 2, 1, 2, *range(10, 30)):
        directory = directory.reference((expert,), 4)
    assert directory.often == (1, 2) and directory.once == (28, 29)
    assert directory.gone_once == (26, 27)
    # A ghost that comes back: its list should be longer, and it was seen twice now.
    again = directory.reference((26,), 4)
    assert again.aim == 1 and again.often == (1, 2, 26) and again.once == (29,)
    # One of those seen often that comes back: the other way.
    for expert in (40, 26, 40, 41, 42):
        again = again.reference((expert,), 4)
    assert again.gone_often and again.reference((again.gone_often[0],), 4).aim < again.aim


def test_fate_favours_shallow_layers(trace, told):
    with pytest.raises(ValueError, match=r"shallow lies in 0…3, not 4"):
        Fate(shallow=4).init(told)
    with pytest.raises(ValueError, match="a layer can have 7 cells and has 8 experts"):
        Fate(shallow=1).init(dataclasses.replace(told, cell_bound=7))

    def cells(policy: Fate, given: int) -> Any:
        seen = Observation(Moment.STEP_BEGIN, 0, 0, 0, -1, -1, 0.0, cells=np.full(LAYERS, given))
        state, decision = policy.decide(policy.init(told), seen)
        assert policy.decide(state, seen)[1].cells is None  # once for a budget
        return None if decision.cells is None else decision.cells.tolist()

    assert cells(Fate(shallow=1), 5) == [8, 4, 4, 4]
    assert cells(Fate(shallow=2), 5) == [8, 8, 2, 2]
    assert cells(Fate(shallow=2), 4) == [8, 3, 3, 2]  # two whole ones leave too little
    assert cells(Fate(shallow=1), 2) is None
    even, shallow = (
        simulate(trace, cells=4, spec=told, driver="host", policies=[Fate(shallow=n)])
        for n in (0, 1)
    )
    # Nothing predicts the first layer, so only cells help it.
    assert shallow.misses[:, 0].sum() < even.misses[:, 0].sum()


# ---- ProMoE


def test_promoe_predicts_a_stride_ahead_the_nearest_layer_first(trace, told):
    policy = promoe.fit(trace, stride=2, **QUICK)
    state, decision = policy.decide(policy.init(told), routed(0, [4]))
    assert set(wanted(decision)) == experts(2, 4)
    state, decision = policy.decide(state, routed(1, [4]))
    assert set(wanted(decision)[:2]) == experts(2, 4)
    assert set(wanted(decision)[2:]) == experts(3, 4)
    state, decision = policy.decide(state, routed(2, [4]))
    assert set(wanted(decision)) == experts(3, 4)
    # A new step knows nothing of the last one's.
    _, decision = policy.decide(state, routed(0, [1]))
    assert set(wanted(decision)) == experts(2, 1)


def test_promoe_learns_what_no_linear_map_knows():
    """Whom a token chooses is here the exclusive or of two inputs: a linear map, by ridge
    regression or otherwise, scores all alike."""
    rng = np.random.default_rng(0)
    x = rng.choice([-1.0, 1.0], (512, 2)).astype(np.float32)
    chosen = (x[:, 0] * x[:, 1] > 0).astype(int)
    y = np.eye(2, dtype=np.float32)[chosen]
    task = promoe.ProMoETask(rate=1e-3, dropout=0.0, batch=256, epochs=200)
    begun = promoe.draw_network((2, 32, 32, 2), rng)

    def score(weights: Any) -> float:
        return float(np.mean(np.argmax(promoe.scores(weights, x), axis=1) == chosen))

    assert score(begun) < 0.9
    assert score(training.train(task, begun, (x, y), score, rng)) > 0.99
    linear = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    assert np.ptp((np.c_[x, np.ones(len(x))] @ linear)[:, 0]) < 0.3


def test_promoe_refuses_what_it_cannot_learn_from(trace, tmp_path):
    with pytest.raises(ValueError, match=r"stride must lie in 1…3, not 4"):
        promoe.fit(trace, stride=4)
    with pytest.raises(TraceError, match="has no gate inputs, which promoe learns from"):
        promoe.fit(trace_of_kinds(tmp_path / "a", [[0]], gate_input=0))
    with TraceWriter(tmp_path / "empty", trace.header):
        pass
    with pytest.raises(TraceError, match="has no tokens to learn from"):
        promoe.fit(read_trace(tmp_path / "empty"))


# ---- MoE-Infinity


def embedded(requests: list[int]) -> Observation:
    return Observation(
        *(Moment.EMBEDDED, 0, 0, 0, -1, -1, 0.0), request=np.array(requests, np.int32)
    )


def ended(request: int) -> Observation:
    return Observation(Moment.TURN_END, 0, 0, 0, request, -1, 0.0)


def stepped(policy: MoEInfinity, state: Any, kinds: list[int], requests: list[int]):
    """A step: (the state after, what was wanted at EMBEDDED and after each router)."""
    state, decision = policy.decide(state, embedded(requests))
    decisions = [decision]
    for layer in range(LAYERS):
        seen = dataclasses.replace(routed(layer, kinds), request=np.array(requests, np.int32))
        state, decision = policy.decide(state, seen)
        decisions.append(decision)
    return state, decisions


def collection_of(told: Spec, trace: Trace, *matrices: np.ndarray) -> MoEInfinity:
    arrays = {"matrices": np.stack(matrices).astype(np.float32)}
    return MoEInfinity(fitted=fit_of("moe-infinity", trace.header, arrays, {"capacity": 128}))


def test_moe_infinity_compares_by_the_cosine(trace, told):
    """A matrix that is peaked has the larger product, the one that is alike the larger cosine."""
    peaked, alike = np.zeros((2, LAYERS, EXPERTS))
    peaked[:, 0], alike[:, :2] = 1, 0.5
    policy = collection_of(told, trace, peaked, alike)
    sequence = np.zeros(EXPERTS)
    sequence[:2] = 0.6, 0.4
    assert sequence @ peaked[0] > sequence @ alike[0]
    state = policy.init(told)
    ids = np.array([[[0]], [[0]], [[0]], [[1]], [[1]]], np.int16)
    seen = Observation(
        *(Moment.ROUTED, 0, 0, 0, -1, 0, 0.0), ids=ids, request=np.zeros(5, np.int32)
    )
    state, decision = policy.decide(state, seen)
    assert set(wanted(decision)) == {(n, e) for n in range(1, LAYERS) for e in (0, 1)}
    assert state.used.tolist() == [0, 1]


def test_moe_infinity_s_order_is_that_of_its_code(trace, told):
    """share · (1 − (x − l)/(L + 1)) at layer l for layer x, as expert_predictor.py has it; not a
    decay from the first layer on, nor none."""
    rng = np.random.default_rng(4)
    matrix = rng.dirichlet(np.full(EXPERTS, 0.7), LAYERS)
    policy = collection_of(told, trace, matrix)
    _, decisions = stepped(policy, policy.init(told), [0], [1])
    places = [*itertools.product(range(LAYERS), range(EXPERTS))]

    def order(now: int, weight) -> list[tuple[int, int]]:
        priority = {p: np.float32(matrix[p]) * weight(p[0], now) for p in places if p[0] > now}
        return sorted(priority, key=lambda place: (-priority[place], place))

    differs = 0
    for layer in range(LAYERS - 1):
        got = wanted(decisions[layer + 1])
        assert got == order(layer, lambda x, now: 1 - (x - now) / (LAYERS + 1))
        differs += got != order(layer, lambda x, now: 1.0)
        differs += 10 * (got != order(layer, lambda x, now: 1 - x / (LAYERS + 1)))
    assert differs >= 11
    short = dataclasses.replace(policy, limit=3)
    _, few = stepped(short, short.init(told), [0], [1])
    assert [wanted(decision) for decision in few] == [wanted(d)[:3] for d in decisions]


def test_moe_infinity_s_first_layers_take_the_most_popular(trace, told):
    one, other = np.zeros((2, LAYERS, EXPERTS))
    one[:, 5], one[:, 6], other[:, 6], other[:, 7], other[:, 5] = 0.6, 0.4, 0.9, 0.07, 0.03
    policy = collection_of(told, trace, one, other)
    decision = policy.decide(policy.init(told), embedded([0]))[1]
    # Share times nearness, as after a router.
    assert wanted(decision) == [(n, e) for e in (6, 5) for n in range(3)]
    none = dataclasses.replace(policy, first=0)
    assert none.decide(none.init(told), embedded([0]))[1].stages == ()
    with pytest.raises(ValueError, match=r"first must be at least 0, not -1"):
        MoEInfinity(first=-1).init(told)


def test_moe_infinity_keeps_what_was_fitted_and_replaces_the_least_used(trace, told):
    fitted_to = moe_infinity.fit(trace, capacity=4)
    state = fitted_to.init(told)
    assert len(state.collection) == 2
    for request, kind in enumerate((0, 3, 1)):
        state, _ = stepped(fitted_to, state, [kind], [request])
        if request == 2:  # now the matrix of kind 0 is used and that of kind 3 is not
            for again in (0, 0):
                state, _ = stepped(fitted_to, state, [again], [9])
        state, _ = fitted_to.decide(state, ended(request))
    assert len(state.collection) == 4
    np.testing.assert_array_equal(state.collection[:2], fitted_to.init(told).collection)
    rest = [set(np.flatnonzero(matrix[0])) for matrix in state.collection[2:]]
    assert rest == [set(ROUTES[0, 0]), set(ROUTES[1, 0])]
    # A request that had no token leaves nothing.
    same, _ = fitted_to.decide(state, ended(77))
    assert same is state


def test_moe_infinity_fits_to_sequences_that_differ(tmp_path, told):
    kinds = [[0, 0, 0, 3]] * 2
    policy = moe_infinity.fit(trace_of_kinds(tmp_path, kinds), capacity=4)
    assert policy.fitted is not None
    first, second = policy.fitted.arrays["matrices"]
    assert set(np.flatnonzero(first[0])) == set(ROUTES[0, 0])
    assert set(np.flatnonzero(second[0])) == set(ROUTES[3, 0])
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        moe_infinity.fit(trace_of_kinds(tmp_path / "x", kinds), capacity=0)
    with pytest.raises(ValueError, match="capacity and limit must be at least 1, not 4 and 0"):
        dataclasses.replace(policy, limit=0).init(told)
    with pytest.raises(ValueError, match="2 matrices are given and capacity is 1"):
        dataclasses.replace(policy, capacity=1).init(told)
    nameless = trace_of_kinds(tmp_path / "y", kinds, absent=("token.request",))
    with pytest.raises(TraceError, match=r"has no token\.request: it was"):
        moe_infinity.fit(nameless)
