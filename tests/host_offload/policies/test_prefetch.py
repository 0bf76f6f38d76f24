"""Prefetch policies do what their papers say, learn from traces, and are refused where they cannot
be."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from host_offload.control.interface import (
    Decision,
    MapRows,
    Moment,
    Observation,
    State,
)
from host_offload.control.rules import (
    PolicyError,
    check_decision,
)
from host_offload.policies.prefetch import coactivation, promoe
from host_offload.policies.prefetch.coactivation import CoActivation
from host_offload.policies.prefetch.expert_map.in_step import ExpertMapInStep
from host_offload.policies.prefetch.fate import Fate
from host_offload.policies.prefetch.fitted import check_fitted, read_fitted
from host_offload.policies.prefetch.fluxmoe import FluxMoE
from host_offload.policies.prefetch.oracle import clairvoyant_of, oracle_of
from host_offload.policies.prefetch.prefetch_names import PREFETCH, with_prefetch
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from host_offload.policies.prefetch.tokens import TokenPrefetch
from host_offload.simulate.bounds import min_transfers, read_references
from host_offload.simulate.simulator import simulate
from tests.host_offload.control import policy_runs
from tests.host_offload.policies.kinds import (
    EXPERTS,
    KINDS,
    LAYERS,
    QUICK,
    ROUTER,
    ROUTES,
    TOP_K,
    experts,
    routed,
    trace_of_kinds,
    wanted,
)
from tests.host_offload.traces.traces_of import random_routing, rewritten, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

FITS: dict[str, Any] = PREFETCH.fits | {
    "promoe": functools.partial(promoe.fit, **QUICK),
    "learned": functools.partial(PREFETCH.fits["learned"], width=8, epochs=2),
    "expertflow": functools.partial(
        PREFETCH.fits["expertflow"], router=ROUTER, trees=2, leaves=8, reach=2
    ),
}


# ---- by name


def test_names():
    known = (
        "coactivation, deepspeed, expert_map, expert_map_in_step, expertflow, fate, fluxmoe, "
        "layer-streaming, learned, learned_online, mixtral-offloading, moe-infinity, oracle, promoe"
    )
    assert [*PREFETCH] == [*known.split(", "), "random", "tokens"]
    learns = {"coactivation", "expert_map", "expert_map_in_step", "expertflow", "learned"}
    assert {*PREFETCH.fits} == learns | {"moe-infinity", "promoe"}
    assert PREFETCH.from_path == {*PREFETCH.fits, "learned_online", "oracle"}
    assert PREFETCH.parse("fate") == Fate()
    assert with_prefetch(None, [Fate()]) == [Fate()]
    assert with_prefetch("random", [Fate()]) == (Fate(), RandomPrefetch())


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "belady",
            "policy 'belady'; known: coactivation, deepspeed, expert_map, expert_map_in_step, exp",
        ),
        ("fate=x", "prefetch policy 'fate' takes no file; leave out =x"),
        ("promoe", "prefetch 'promoe' needs a file that its fit wrote: promoe=PATH"),
        ("oracle", "prefetch 'oracle' needs the trace of the very run: oracle=PATH"),
        ("oracle=/nowhere", "/nowhere is no trace"),
        ("promoe=/nowhere", "/nowhere: cannot be read as a fitted policy"),
    ],
)
def test_names_that_are_refused(name, match):
    with pytest.raises(ValueError, match=match):
        PREFETCH.parse(name)


# ---- tokens


FACTS = policy_runs.spec(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


def everywhere(*kinds: int) -> set[tuple[int, int]]:
    return set().union(*(experts(layer, *kinds) for layer in range(LAYERS)))


def tokens_seen(moment: Moment, token, draft=(), layer: int = -1, **fields) -> Observation:
    """A token of kind n chooses what kind n does."""
    ids = {"ids": ROUTES[[*token]], "draft_ids": ROUTES[[*draft]]}
    known = {
        "token": np.array(token),
        "draft_token": np.array(draft, np.int32),
        "request": np.arange(len(token)),
        "position": np.full(len(token), 7),
        "phase": np.ones(len(token), np.uint8),
        **(ids if moment == Moment.STEP_END else {}),
        **fields,
    }
    return Observation(moment, 0, 0, 0, -1, layer, 0.0, **known)


def what_is_wanted(policy: TokenPrefetch, state, *given, **fields) -> list[tuple[int, int]]:
    return wanted(policy.decide(state, tokens_seen(Moment.EMBEDDED, *given, **fields))[1])


def after(policy: TokenPrefetch, *steps: Observation):
    state = policy.init(FACTS)
    for step in steps:
        before = pickle.dumps(state)
        following, decision = policy.decide(state, step)
        assert pickle.dumps(state) == before and decision.stages is None
        state = following
    return state


def test_tokens_of_a_step_and_its_drafts_bring_what_they_chose_when_last_seen():
    policy = TokenPrefetch()
    state = after(policy, tokens_seen(Moment.STEP_END, [0, 1], [2]))
    for token, draft in (([0], ()), ([3], [1]), ([1], [2]), ([3], ())):
        kinds = [kind for kind in (*token, *draft) if kind != 3]
        found = what_is_wanted(policy, state, token, draft)
        assert {*found} == everywhere(*kinds) and len(found) == len({*found})
        assert [layer for layer, _ in found] == sorted(layer for layer, _ in found)
    assert what_is_wanted(policy, state, [0], phase=np.zeros(1, np.uint8)) == []
    state = after(policy, tokens_seen(Moment.STEP_END, [0]))
    other = tokens_seen(Moment.STEP_END, [0], ids=ROUTES[[4]])
    state, _ = policy.decide(state, other)
    assert {*what_is_wanted(policy, state, [0])} == everywhere(4)


def test_experts_of_most_rows_come_first_and_those_of_layers_that_are_past_not_at_all():
    policy = TokenPrefetch()
    state = after(policy, tokens_seen(Moment.STEP_END, [0, 1]))
    state, decision = policy.decide(state, tokens_seen(Moment.EMBEDDED, [0], [1, 1]))
    found = wanted(decision)
    assert {*found[:TOP_K]} == experts(0, 1)
    for layer in range(LAYERS):
        state, decision = policy.decide(state, tokens_seen(Moment.ROUTED, [0], layer=layer))
        assert wanted(decision) == [place for place in found if place[0] > layer]


def test_what_a_token_chose_last_counts_in_a_sequence_and_before_a_rejected_draft():
    policy = TokenPrefetch()
    rows = {"request": np.zeros(3, np.int32), "ids": ROUTES[[1, 2, 3]]}
    for order in ([0, 1, 2], [1, 2, 0]):
        step = tokens_seen(Moment.STEP_END, [0, 0, -1], **rows, position=np.array([5, 9, 8]))
        shown = {name: getattr(step, name)[order] for name in ("token", "ids", "position")}
        state = after(policy, dataclasses.replace(step, **shown))
        assert {*what_is_wanted(policy, state, [0])} == everywhere(2)
        assert [*state.known] == [0]  # what is not known teaches nothing
    step = tokens_seen(Moment.STEP_END, [0], [0], ids=ROUTES[[1]], draft_ids=ROUTES[[2]])
    assert np.array_equal(after(policy, step).known[0], ROUTES[1])


def test_only_so_many_tokens_are_remembered_and_the_longest_unseen_goes():
    policy = TokenPrefetch(capacity=2)
    one = [tokens_seen(Moment.STEP_END, [token]) for token in (0, 1, 0, 2)]
    state = after(policy, *one)
    assert [*state.known] == [0, 2]
    assert all(ids.base is None for ids in state.known.values())  # no view of a whole step
    assert policy.memory(FACTS) == 2 * LAYERS * TOP_K * 2
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        TokenPrefetch(capacity=0).init(FACTS)


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


def streaming(cells: int) -> Callable[..., Any]:
    """Asks FluxMoE in 4 layers of 8 experts with so many cells, where a higher number was used more
    and experts 6 and 7 are absent. Returns (stages, priors)."""
    state = np.full((4, 8), State.RESIDENT, np.int8)
    state[:, 6:] = State.ABSENT
    tables = {"cells": np.full(4, cells // 4), "frequency": np.tile(np.arange(8), (4, 1))}
    policy = FluxMoE()
    last = policy.init(policy_runs.spec(layers=4, experts=8))

    def ask(moment: Moment, layer: int, **fields: Any) -> tuple[list[tuple[int, int]], Any]:
        nonlocal last
        known = {"state": state, **tables, **fields}
        last, decision = policy.decide(last, Observation(moment, 0, 0, 0, -1, layer, 0.0, **known))
        return wanted(decision), decision.prior

    return ask


def test_fluxmoe_brings_the_next_layer_beside_the_experts_that_were_used_most():
    ask = streaming(24)  # 16 are of two whole layers, 4 of each of the others
    assert ask(Moment.LAYER_BEGIN, 0) == ([(0, 7), (0, 6)], None)
    stages, prior = ask(Moment.ROUTED, 0)
    assert stages == [(1, 7), (1, 6)]
    assert prior.tolist() == [[0] * 4 + [1] * 4, [1] * 8, [0] * 8, [0] * 8]
    assert ask(Moment.LAYER_BEGIN, 1) == (stages, None)
    none = np.full((4, 8), State.ABSENT, np.int8)
    stages, prior = ask(Moment.ROUTED, 3, state=none)
    assert stages == [(0, expert) for expert in range(7, -1, -1)]
    assert prior.tolist() == [[1] * 8, [1] * 8, [0] * 8, [0] * 4 + [1] * 4]
    assert ask(Moment.STEP_BEGIN, -1) == ([], None)  # nothing is left for the step's own list


def test_fluxmoe_leaves_the_present_layer_its_cells():
    for cells, brought in ((8, 0), (12, 0), (16, 2)):
        stages, prior = streaming(cells)(Moment.ROUTED, 0)
        assert len(stages) == brought and not prior[0].any()


def test_fluxmoe_misses_nothing_once_residents_are_known(tmp_path):
    """Each step brings what is no resident, once, where others are missed on demand."""
    layers, experts, cells = 6, 16, 10
    rng, hot = np.random.default_rng(0), np.arange(layers)[:, None] + np.arange(4)
    often = np.ones((layers, experts))
    often[np.arange(layers)[:, None], hot] = 8
    often /= often.sum(axis=1, keepdims=True)
    steps = [
        np.array([[rng.choice(experts, 3, replace=False, p=p) for p in often] for _ in range(24)])
        for _ in range(40)
    ]
    plain, requests = write_trace(tmp_path / "plain", steps, experts), np.arange(24, dtype=np.int32)
    each = (step._replace(request=requests) for step in plain.step_traces())
    run = rewritten(tmp_path / "t", plain, each)
    found = simulate(run, prefetch="fluxmoe", driver="host", cells=cells)
    residents = (layers * cells - 2 * experts) // (layers - 2)
    assert not found.misses[10:].any()
    assert set(found.staged[10:].sum(axis=1)) <= {layers * (experts - residents)}
    assert simulate(run, driver="host", cells=cells).misses[10:].sum() > 800


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
    later = rewritten(tmp_path / "late", other, itertools.islice(other.step_traces(), 1, None))
    with pytest.raises(ValueError, match="lacks steps of its run"):
        oracle_of(later)


def test_who_knows_the_run_between_layers_misses_nothing(tmp_path):
    """Every expert is there before its router chooses it, and few more move than MIN must."""
    rng = np.random.default_rng(0)
    run = write_trace(tmp_path / "t", random_routing(rng, 60, LAYERS, 32, 3), 32)
    between, steps = (
        simulate(run, policies=[policy], driver="host", cells=9)
        for policy in (clairvoyant_of(run), oracle_of(run))
    )
    assert between.misses.sum() == 0 and steps.misses.sum() > 60
    least = min_transfers(read_references(run), 9).sum()
    assert least <= between.transfers.sum() < min(1.25 * least, steps.transfers.sum())
    other = trace_of_kinds(tmp_path / "other", [[0, 3]] * 3)
    with pytest.raises(ValueError, match="step 0 did not route as the future said"):
        simulate(
            trace_of_kinds(tmp_path / "run", [[1, 3]] * 3),
            policies=[clairvoyant_of(other)],
            driver="host",
        )


# ---- what was learned, as a file


@pytest.mark.parametrize("name", FITS)
def test_what_was_learned_comes_back_from_its_file(name, trace, told, tmp_path):
    policy: Any = FITS[name](trace)
    fitted_as = policy.fitted.policy  # two forms read expert_map's file
    path = tmp_path / "learned"
    policy.fitted.write(path)
    again: Any = PREFETCH.parse(f"{name}={path}")
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


@pytest.mark.parametrize("name", FITS)
def test_arrays_of_an_edited_file_are_refused(name, trace, told, tmp_path):
    path = tmp_path / "edited"
    FITS[name](trace).fitted.write(path)
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
    arrays = load_file(path)

    def refuses(match: str, **changed: np.ndarray | None) -> None:
        both = {**arrays, **changed}
        save_file({n: array for n, array in both.items() if array is not None}, path, header)
        with pytest.raises(ValueError, match=f"edited.*{match}"):
            PREFETCH.parse(f"{name}={path}").init(told)

    for array, found in arrays.items():
        shorter = {array: np.ascontiguousarray(found[..., :-1])}
        if name != "expertflow" or not array.endswith("basis"):  # of as many columns as it likes
            refuses(r"array \S+ is \w+\[.*\] and must be \w+.*\[.*\]; fit it again", **shorter)
        refuses(f"{array} is float64", **{array: found.astype(np.float64)})
        if found.dtype.kind == "f":
            refuses(f"{array} must be of finite", **{array: np.full_like(found, np.nan)})
        elif name == "expertflow":
            for place in (-1, np.iinfo(found.dtype).max):
                refuses(f"{array} must be of 0 … ", **{array: np.full_like(found, place)})
        refuses(f"has no array {array};", **{array: None})


def test_files_that_are_refused(trace, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    promoe.fit(trace, **QUICK).fitted.write(good)
    with pytest.raises(ValueError, match="was fitted for 'promoe', not for 'coactivation'"):
        PREFETCH.parse(f"coactivation={good}")
    arrays = load_file(good)
    header = {"format": "moejax.policy", "version": "2", "policy": "promoe"}
    for metadata, match in (
        ({}, "is not a fitted policy"),
        (header | {"version": "1"}, "version 1, this moejax reads 2; fit it again"),
        (header, "its header is damaged"),
    ):
        save_file(arrays, bad, metadata)
        with pytest.raises(ValueError, match=match):
            read_fitted(bad, "promoe")
    bad.write_bytes(good.read_bytes()[:-20])
    with pytest.raises(ValueError, match="bad: cannot be read as a fitted policy"):
        read_fitted(bad, "promoe")


# ---- contract 5


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
