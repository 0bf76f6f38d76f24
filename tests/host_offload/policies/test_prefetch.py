"""Prefetch policies do what their papers say, learn from traces, and are refused where they cannot
be."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from host_offload.control.controller import Controller
from host_offload.control.interface import (
    Decision,
    MapRows,
    Moment,
    Observation,
    Policy,
    Spec,
    State,
)
from host_offload.control.rules import (
    PolicyError,
    check_decision,
    check_policies,
    search_of,
    wants_pool,
)
from host_offload.policies.prefetch import coactivation
from host_offload.policies.prefetch.coactivation import CoActivation
from host_offload.policies.prefetch.deepspeed import DeepSpeedInference
from host_offload.policies.prefetch.expert_map.in_step import ExpertMapInStep
from host_offload.policies.prefetch.expert_map.policy import ExpertMap
from host_offload.policies.prefetch.fate import Fate
from host_offload.policies.prefetch.fitted import check_fitted, read_fitted
from host_offload.policies.prefetch.names import (
    FIT,
    FROM_PATH,
    PREFETCH,
    prefetch_policy,
    with_prefetch,
)
from host_offload.policies.prefetch.oracle import oracle_of
from host_offload.policies.prefetch.promoe import policy as promoe
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from host_offload.simulate.bounds import in_one_pool, min_transfers, read_references
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.writer import TraceWriter
from scripts.experiments.static_layers import StaticLayers
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.policies.kinds import (
    EXPERTS,
    KINDS,
    LAYERS,
    QUICK,
    ROUTER,
    ROUTES,
    TOP_K,
    routed,
    trace_of_kinds,
    wanted,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

FITS: dict[str, Any] = FIT | {"promoe": functools.partial(promoe.fit, training=QUICK)}


# ---- by name


def test_names():
    known = (
        "coactivation, deepspeed, expert_map, expert_map_in_step, expertflow, fate, "
        "layer-streaming, learned, learned_online, mixtral-offloading, moe-infinity, oracle, promoe"
    )
    assert sorted(PREFETCH.keys() | FROM_PATH.keys()) == [*known.split(", "), "random"]
    assert set(FIT) == {
        *("coactivation", "expert_map", "expert_map_in_step", "moe-infinity", "promoe")
    }
    assert prefetch_policy("fate") == Fate()
    assert with_prefetch(None, [Fate()]) == [Fate()]
    assert with_prefetch("random", [Fate()]) == (Fate(), RandomPrefetch())


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "belady",
            "policy 'belady'; known: coactivation, deepspeed, expert_map, expert_map_in_step, exp",
        ),
        ("fate=x", "prefetch 'fate' learns nothing; leave out =x"),
        ("promoe", "prefetch 'promoe' needs a file that its fit wrote: promoe=PATH"),
        ("oracle", "prefetch 'oracle' needs the trace of the very run: oracle=PATH"),
        ("oracle=/nowhere", "/nowhere is no trace"),
        ("promoe=/nowhere", "/nowhere: cannot be read as a fitted policy"),
    ],
)
def test_names_that_are_refused(name, match):
    with pytest.raises(ValueError, match=match):
        prefetch_policy(name)


def test_policies_between_layers_name_the_driver_that_has_them(trace):
    both = ("random", "deepspeed", "expert_map_in_step")
    between = [prefetch_policy(name) for name in PREFETCH if name not in both]
    for policy in [*between, promoe.fit(trace, training=QUICK)]:
        with pytest.raises(PolicyError, match="driver='device' lacks; driver='host' has it"):
            check_policies([policy], "device")
        check_policies([policy], "host")
    check_policies([RandomPrefetch()], "device")
    check_policies([DeepSpeedInference()], "device")


# ---- co-activation


def test_coactivation_scores_are_those_of_appendix_c(told):
    """Against counts in plain Python: conditional frequencies, summed with decay."""
    policy: CoActivation = CoActivation(decay=0.5, reach=2)
    state = policy.init(told)
    rng = np.random.default_rng(1)
    history = []
    for _ in range(12):
        kinds = rng.integers(KINDS, size=2).tolist()
        for layer in range(LAYERS):
            state, decision = policy.decide(state, routed(layer, kinds))
            if layer == LAYERS - 1:
                assert decision.stages == ()
                continue
            predicted = set()
            for kind in kinds:
                score = np.zeros(EXPERTS)
                for d, source in enumerate(range(layer, max(layer - 2, -1), -1)):
                    for i in ROUTES[kind, source]:
                        fired = [k for k in history if i in ROUTES[k, source]]
                        for k in fired:
                            score[ROUTES[k, layer + 1]] += 0.5**d / len(fired)
                best = np.argsort(-score, kind="stable")[:TOP_K]
                predicted |= {(layer + 1, int(e)) for e in best if score[e] > 1e-9}
            assert set(wanted(decision)) == predicted
        history += kinds


def test_coactivation_fitted_to_a_trace_counts_what_a_run_counts(trace, told):
    policy, online = coactivation.fit(trace, reach=2), CoActivation(reach=2)
    state = online.init(told)
    for step in trace.step_traces():
        for layer in range(LAYERS):
            observation = dataclasses.replace(routed(layer, [0]), ids=step.ids[:, layer, None])
            state, _ = online.decide(state, observation)
    for found, counted in zip(policy.init(told).pairs, state.pairs, strict=True):
        np.testing.assert_array_equal(found, counted)
    with pytest.raises(ValueError, match="reach 3 is not that of the counts, 2"):
        CoActivation(fitted=policy.fitted, reach=3).init(told)
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\]"):
        CoActivation(decay=0).init(told)


# ---- controls, and whole layers


def test_random_prefetch_draws_absent_experts_and_the_same_again(told):
    state = np.full((LAYERS, EXPERTS), State.RESIDENT, np.int8)
    state[1, :5] = State.ABSENT
    policy = RandomPrefetch(count=3)
    drawn = []
    for step in range(30):
        seen = Observation(Moment.STEP_END, step, 1, 0, -1, -1, 0.0, state=state)
        _, decision = policy.decide(policy.init(told), seen)
        assert len(set(wanted(decision))) == 3
        assert decision == policy.decide(policy.init(told), seen)[1]
        drawn += wanted(decision)
    assert set(drawn) == {(1, expert) for expert in range(5)}
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        RandomPrefetch(count=0).init(told)


def test_the_oracle_prefetches_what_comes(tmp_path):
    kinds = np.random.default_rng(2).integers(KINDS, size=60)
    trace = trace_of_kinds(tmp_path, [[int(kind)] for kind in kinds])
    alone = simulate(trace, cells=4)
    ahead = simulate(trace, cells=4, policies=[oracle_of(trace)])
    assert ahead.control is not None
    counts = ahead.control["transfers"]["oracle"]
    assert ahead.misses.sum() < 0.7 * alone.misses.sum()
    blind = simulate(trace, cells=4, policies=[RandomPrefetch()])
    assert blind.control is not None
    random = blind.control["transfers"]["random"]
    assert counts["used"] / counts["done"] > 0.8 > 0.6 > random["used"] / random["done"]


def test_an_oracle_is_of_one_run_only(trace, told, tmp_path):
    other = trace_of_kinds(tmp_path / "other", [[0, 3]] * 3)
    with pytest.raises(ValueError, match="step 0 did not route as the future said"):
        simulate(trace_of_kinds(tmp_path / "run", [[1, 3]] * 3), policies=[oracle_of(other)])
    with pytest.raises(ValueError, match="the future ends before step 3"):
        simulate(trace_of_kinds(tmp_path / "long", [[0, 3]] * 9), policies=[oracle_of(other)])
    with pytest.raises(ValueError, match="the future is of a model with 4 layers of 8 experts"):
        oracle_of(other).init(dataclasses.replace(told, layers=3))
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        oracle_of(other, horizon=0).init(told)
    late = _without_its_first_step(other, tmp_path)
    with pytest.raises(ValueError, match="lacks steps of its run"):
        oracle_of(late)


def _without_its_first_step(trace: Trace, tmp_path: Path) -> Trace:
    with TraceWriter(tmp_path / "late", trace.header) as writer:
        for step in itertools.islice(trace.step_traces(), 1, None):
            writer.append(step)
    return read_trace(tmp_path / "late")


def test_static_layers_has_the_last_layers_whole_and_reads_the_others_through(trace, told):
    run = simulate(trace, cells=[5, 5, 5, 3], policies=[StaticLayers()])  # 18 cells: two layers
    assert not run.fills[:, :2].any() and not run.hits[:, :2].any()
    assert run.read_through[:, :2].all() and not run.read_through[:, 2:].any()
    assert not run.misses[20:, 2:].any() and run.hits[20:, 2:].all()
    assert run.control is not None and run.control["decisions"]["StaticLayers"] == 1
    with pytest.raises(ValueError, match="a layer can have 7 cells and has 8 experts"):
        StaticLayers().init(dataclasses.replace(told, cell_bound=7))


def test_gates_learned_and_counted_predictions_save_misses(trace, told):
    """Inputs say all here, so the gate and the learned predictor know every layer but the first."""
    half: dict[str, Any] = dict(cells=4, driver="host", spec=told)
    alone = simulate(trace, cells=4, driver="host").misses
    fate = simulate(trace, policies=[Fate()], **half).misses
    assert not fate[:, 1:].any() and fate[:, 0].sum() == alone[:, 0].sum()
    learned = simulate(trace, policies=[promoe.fit(trace, stride=1, training=QUICK)], **half).misses
    assert not learned[:, 1:].any()
    counted = simulate(trace, policies=[coactivation.fit(trace)], **half).misses
    assert counted.sum() < 0.6 * alone.sum()


# ---- what was learned, as a file


@pytest.mark.parametrize("name", FIT)
def test_what_was_learned_comes_back_from_its_file(name, trace, told, tmp_path):
    policy: Any = FITS[name](trace)
    fitted_as = policy.fitted.policy  # two forms read expert_map's file
    path = tmp_path / "learned"
    policy.fitted.write(path)
    again: Any = prefetch_policy(f"{name}={path}")
    assert again.fitted.nbytes == sum(a.nbytes for a in policy.fitted.arrays.values()) > 0
    for array, found in policy.fitted.arrays.items():
        np.testing.assert_array_equal(again.fitted.arrays[array], found)
    again.init(told)
    check_fitted([again, Fate()], trace.header.config_digest)
    with pytest.raises(
        ValueError, match=f"{fitted_as} was fitted to a model of configuration 0f0f"
    ):
        check_fitted([again], "ab" * 32)
    with pytest.raises(
        ValueError, match=f"{fitted_as} was fitted to a model with experts 8, this one"
    ):
        again.init(dataclasses.replace(told, experts=9))
    with pytest.raises(ValueError, match="read-only"):
        again.fitted.arrays[array][:] = 0


def test_files_that_are_refused(trace, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    promoe.fit(trace, training=QUICK).fitted.write(good)
    with pytest.raises(ValueError, match="was fitted for 'promoe', not for 'coactivation'"):
        prefetch_policy(f"coactivation={good}")
    arrays = load_file(good)
    header = {"format": "moejax.policy", "version": "1", "policy": "promoe"}
    for metadata, match in (
        ({}, "is no fitted policy"),
        (header | {"version": "2"}, "version 2, this moejax reads 1; fit it again"),
        (header, "its header is damaged"),
    ):
        save_file(arrays, bad, metadata)
        with pytest.raises(ValueError, match=match):
            read_fitted(bad, "promoe")
    bad.write_bytes(good.read_bytes()[:-20])
    with pytest.raises(ValueError, match="bad: cannot be read as a fitted policy"):
        read_fitted(bad, "promoe")


# ---- contract 5


def policies_of(trace: Trace) -> dict[str, Policy]:
    return {
        **{name: factory() for name, factory in PREFETCH.items()},
        **{f"{name}, fitted": fit(trace) for name, fit in FITS.items()},
        "oracle": oracle_of(trace),
        "static-layers": StaticLayers(),
    }


def test_rows_of_maps_that_are_refused(told):
    policy = ExpertMapInStep()
    maps = np.zeros((2, told.layers, told.experts), np.float16)
    good = MapRows(np.array([3, 1]), np.zeros((2, told.hidden)), maps)
    found = check_decision(Decision(map_rows=good), policy, told, "start").map_rows
    assert found is not None and found.embeddings.dtype == np.float16
    bad: list[tuple[Any, str]] = [
        (maps, "map_rows must be a MapRows, not ndarray"),
        (good._replace(maps=maps[:1]), "map_rows must be of shapes"),
        (good._replace(place=np.array([3, 3])), "names a place twice"),
        (good._replace(place=np.array([-1, 3])), "or one below 0"),
    ]
    for rows, match in bad:
        with pytest.raises(PolicyError, match=match):
            check_decision(Decision(map_rows=rows), policy, told, "start")


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Puts what it sees into a list."""

    moments: frozenset[Moment]
    needs: frozenset[str]
    seen: list[Observation]
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        self.seen.append(observation)
        return None, Decision()


def test_prefetch_policies_are_pure(trace, told):
    """The same observations give the same decisions, and no state is changed in place."""
    for name, policy in policies_of(trace).items():
        if not policy.moments:
            continue
        observations: list[Observation] = []
        recorder = Recorder(policy.moments, policy.needs, observations)
        simulate(trace, driver="host", spec=told, policies=[recorder])
        assert len(observations) >= 40, name

        def decisions(policy: Policy, observations=observations, name=name) -> list[bytes]:
            state, made = policy.init(told), []
            for observation in observations[:60]:
                before, kept = pickle.dumps((state, observation)), state
                state, decision = policy.decide(state, observation)
                assert pickle.dumps((kept, observation)) == before, name
                made.append(pickle.dumps(decision))
            return made

        first = decisions(policy)
        assert first == decisions(copy.deepcopy(policy)), name
        assert first == decisions(pickle.loads(pickle.dumps(policy))), name
        assert hash(policy) == hash(copy.deepcopy(policy)), name


# ---- any routing: never below MIN, and as plain Python pages


SEQUENCES = st.lists(
    st.lists(st.integers(0, KINDS - 1), min_size=1, max_size=3), min_size=12, max_size=24
)


@settings(max_examples=3, deadline=None)
@given(kinds=SEQUENCES)
def test_no_prefetch_moves_less_than_min(tmp_path_factory, kinds):
    """Every prefetch by name, those that are fitted, the oracle and static layers, with cells for
    the largest step set; MIN of one pool for those whose cells go from layer to layer."""
    trace = trace_of_kinds(tmp_path_factory.mktemp("min"), kinds)
    spec = dataclasses.replace(spec_of(trace.header), driver="host", router=ROUTER)
    references = read_references(trace)
    cells = int(references.largest.max())
    least = min_transfers(references, cells)
    pool = min_transfers(in_one_pool(references), cells * LAYERS)
    for name, policy in policies_of(trace).items():
        driver = "host" if search_of([policy]) is None else "device"
        run = simulate(trace, policies=[policy], spec=spec, cells=cells, driver=driver)
        found = run.transfers.sum(axis=0)
        assert found.sum() >= pool.sum(), name
        if name != "static-layers" and not wants_pool(policy):
            assert (found >= least).all(), name


@settings(max_examples=2, deadline=None)
@given(kinds=SEQUENCES, cells=st.integers(0, EXPERTS))
def test_prefetch_pages_as_plain_python(tmp_path_factory, kinds, cells):
    """Every prefetch, through the same controller, beside a device in plain Python that has the
    moments between layers."""
    trace = trace_of_kinds(tmp_path_factory.mktemp("plain"), kinds)
    spec = dataclasses.replace(spec_of(trace.header), driver="host", router=ROUTER)
    policies = policies_of(trace)
    del policies["static-layers"]  # moves cells, which this device cannot
    for name, policy in policies.items():
        if search_of([policy]) is not None:  # its steps decide: engine/test_policies.py
            continue
        if isinstance(policy, ExpertMap):  # nor has it cells of one pool: the same
            policy = dataclasses.replace(policy, pool=False)
        wanted: list = []
        device = LayeredDevice(Controller(spec, [policy], listener=wanted.append), cells)
        device.run(trace)
        events: list = []
        missed: list = []
        found = simulate(
            trace,
            policies=[policy],
            spec=spec,
            cells=cells,
            listener=events.append,
            watcher=lambda step, missed=missed: missed.append(step.missed),
        )
        np.testing.assert_array_equal(missed, device.missed, err_msg=name)
        assert found.staged.sum(axis=1).tolist() == device.staged, name
        assert list(map(repr, events)) == list(map(repr, wanted)), name
