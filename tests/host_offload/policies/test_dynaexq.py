"""DynaExq does what its paper says, and its settings are what they are called."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.interface import Decision, Moment, Observation, State, Transition
from host_offload.control.rules import PolicyError, check_decision, check_policies
from host_offload.memory.budget import cells_per_layer
from host_offload.policies.precision.dynaexq import DynaExq, Hotness
from host_offload.policies.precision.maps import HI, LO, random_map, top_map
from host_offload.policies.precision.precision_names import precision_of
from tests.host_offload.control.policy_runs import EXPERTS, LAYERS, spec
from tests.host_offload.memory.resident_device import resident, spec_for
from tests.host_offload.traces.traces_of import random_routing, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

N = 3
"""High experts of a layer."""


def observed(counts: Any, high: Any, state: Any = None, interval: int = 1) -> Observation:
    """The end of an interval with these counts [L, E]; high bool[L, E]: residents."""
    version = np.where(high, HI, LO).astype(np.int8)
    return Observation(
        moment=Moment.INTERVAL,
        step=interval,
        age=1,
        interval=interval,
        turn=-1,
        layer=-1,
        seconds=0.0,
        counts=np.asarray(counts, np.int32),
        version=version,
        state=np.full(version.shape, State.RESIDENT, np.int8) if state is None else state,
    )


def run(
    policy: DynaExq, counts: Sequence | np.ndarray, capacity: int = N * LAYERS
) -> list[Hotness]:
    """The states after intervals with counts [n, L, E], every transition done at once. Checks that
    the decision is what turns the residents into the high set."""
    state = policy.init(spec(capacity=(capacity, LAYERS * EXPERTS)))
    high, states = state.high, []
    for number, interval in enumerate(counts, 1):
        state, decision = policy.decide(state, observed(interval, high, interval=number))
        assert decision.transitions is not None
        new = high.copy()
        for layer, expert, version in decision.transitions:
            assert new[layer, expert] == (version == LO), "a transition to what is there"
            new[layer, expert] = version == HI
        np.testing.assert_array_equal(new, state.high)
        high = new
        states.append(state)
    return states


intervals = st.lists(
    st.lists(st.integers(0, 6), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS),
    min_size=1,
    max_size=8,
).map(lambda rows: np.array(rows).reshape(-1, LAYERS, EXPERTS))
"""int[n, L, E], with many ties."""

settings = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.3, 0.9]),
        "margin": st.sampled_from([0.0, 0.1, 1.0]),
        "slack": st.sampled_from([None, 0, 2]),
    }
)


# ---- papers.md 2.7


@given(intervals)
def test_without_memory_and_margin_it_is_the_top_of_the_last_interval(counts):
    """2.7, item 3: up to ties, which insiders keep."""
    for interval, state in zip(counts, run(DynaExq(alpha=0, margin=0), counts), strict=True):
        for count, high in zip(interval, state.high, strict=True):
            used = min(N, int(np.sum(count > 0)))
            assert used <= high.sum() <= N
            assert not high.any() or not (~high).any() or count[high].min() >= count[~high].max()


def crossing(below: float, rounds: int = 40) -> np.ndarray:
    """Two experts that change places in each interval; the one ahead leads by `below` of the mean,
    six others are equal."""
    mean = 100
    counts = np.full((rounds, LAYERS, EXPERTS), mean)
    lead = int(below * mean)
    counts[:, :, 0] += lead * (np.arange(rounds) % 2 == 0)[:, None]
    counts[:, :, 1] += lead * (np.arange(rounds) % 2 == 1)[:, None]
    counts[:, :, 2] += 1000
    return counts


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_scores_that_cross_by_less_than_the_margin_cause_nothing(alpha):
    """2.7, item 4, first half: two are high, expert 2 and one of those that cross."""
    counts = crossing(0.2)
    steady = run(DynaExq(alpha=alpha, margin=0.2), counts, 2 * LAYERS)
    assert all(np.array_equal(state.high, steady[0].high) for state in steady)
    # Without the margin it flutters in every interval, so the test can fail.
    flutter = run(DynaExq(alpha=alpha, margin=0.0), counts, 2 * LAYERS)
    changed = [np.sum(a.high != b.high) for a, b in itertools.pairwise(flutter)]
    assert min(changed) == 2 * LAYERS


@pytest.mark.parametrize(("alpha", "horizon"), [(0.0, 1), (0.5, 2), (0.8, 4), (0.9, 8)])
def test_a_shift_of_the_hot_set_is_followed_within_the_horizon(alpha, horizon):
    """2.7, item 4, second half. The old score decays as α^t, the new one is 1 − α^t: they meet at
    t = log ½ / log α; the margin of a tenth of the mean adds less than one interval."""
    old, new = np.full((2, LAYERS, EXPERTS), 10)
    old[:, :N], new[:, -N:] = 100, 100
    states = run(DynaExq(alpha=alpha), [old] * 80 + [new] * 12)
    assert np.all(states[79].high[:, :N])
    followed = [bool(np.all(state.high[:, -N:])) for state in states[80:]]
    assert followed.index(True) + 1 == horizon and all(followed[horizon:])


# ---- what always holds


@given(intervals, settings, st.integers(0, LAYERS * EXPERTS))
def test_the_high_set_fits_and_is_made_of_who_was_used(counts, given_settings, capacity):
    policy = DynaExq(**given_settings)
    used = np.zeros((LAYERS, EXPERTS), bool)
    for interval, state in zip(counts, run(policy, counts, capacity), strict=True):
        used |= interval > 0
        assert not np.any(state.high & ~used)
        most = np.array(cells_per_layer(capacity, LAYERS, EXPERTS))
        assert most.sum() == capacity and most.max() - most.min() <= 1
        np.testing.assert_array_equal(state.high.sum(axis=1), np.minimum(most, used.sum(1)))


# ---- rank slack


def test_slack_keeps_insiders_that_are_near():
    counts = np.zeros((3, LAYERS, EXPERTS), int)
    counts[0, :, :5] = [50, 40, 30, 20, 10]
    counts[1, :, :5] = [50, 40, 10, 20, 30]  # expert 2 falls to rank 5: 3 + 2
    counts[2, :, :6] = [50, 40, 5, 20, 30, 10]  # to rank 6
    states = run(DynaExq(alpha=0, slack=2), counts)
    high = [np.flatnonzero(state.high[0]).tolist() for state in states]
    assert high == [[0, 1, 2], [0, 1, 2], [0, 1, 4]]
    strict = run(DynaExq(alpha=0, slack=0), counts)
    assert np.flatnonzero(strict[1].high[0]).tolist() == [0, 1, 4]


def test_the_margin_is_a_share_of_the_mean_score_of_the_layer():
    """An outsider that leads by less than the margin of the largest score, but by more than that of
    the mean, takes a place."""
    counts = np.zeros((2, LAYERS, EXPERTS), int)
    counts[0, :, :3], counts[1, :, :4] = [100, 90, 80], [100, 90, 80, 86]
    last = run(DynaExq(alpha=0, margin=0.1), counts)[-1]
    assert np.flatnonzero(last.high[0]).tolist() == [0, 1, 3]
    counts[1, :, 3] = 84  # the mean is 44.25
    last = run(DynaExq(alpha=0, margin=0.1), counts)[-1]
    assert np.flatnonzero(last.high[0]).tolist() == [0, 1, 2]


def test_a_layer_has_as_many_high_experts_as_it_has_cells_for():
    counts = np.zeros((1, LAYERS, EXPERTS), int)
    counts[0, 0, :5], counts[0, 1, :1] = 10, 10
    policy = DynaExq(paged=True)
    (state,) = run(policy, counts)
    assert [np.flatnonzero(row).tolist() for row in state.high] == [[0, 1, 2], [0]]
    warm = dataclasses.replace(policy, scores=counts[0])
    assert (warm.start(LAYERS, EXPERTS, 6) == HI).sum(axis=1).tolist() == [3, 3]
    for capacity in range(LAYERS * EXPERTS + 1):
        cells = cells_per_layer(capacity, LAYERS, EXPERTS)
        assert (top_map(counts[0], capacity) == HI).sum(axis=1).tolist() == list(cells)


def test_a_layer_that_low_makes_no_smaller_has_no_high_experts():
    low = {"high": np.full(LAYERS, 100), "low": np.array([40, 100])}
    told = spec(version_bytes=low, capacity=(N * LAYERS, LAYERS * EXPERTS))
    counts = np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    for scores in (None, counts.astype(float)):
        policy = DynaExq(paged=True, scores=scores)
        state = policy.init(told)
        state, decision = policy.decide(state, observed(counts, state.high))
        assert state.high.sum(axis=1).tolist() == [N * LAYERS, 0]
        assert decision.fill_version is not None and (decision.fill_version[1] == LO).all()
    assert (random_map(2, 8, 6, 1, [False, True]) == HI).sum(axis=1).tolist() == [0, 6]
    assert (random_map(2, 8, 9, 1, [False, True]) == HI).sum(axis=1).tolist() == [0, 8]


def test_nothing_is_high_in_such_a_layer_whatever_a_policy_says():
    sizes = {"high": np.array([100, 40]), "low": np.full(LAYERS, 40)}
    asked = np.array([HI, LO, -1 - HI, -1 - LO] * 2, np.int8)
    decision = Decision(
        fill_version=np.array([asked] * 2),
        transitions=(Transition(0, 1, HI), Transition(1, 2, HI), Transition(1, 3, LO)),
    )
    told = check_decision(decision, DynaExq(paged=True), spec(version_bytes=sizes), "x")
    assert told.transitions == (Transition(0, 1, HI),) and told.fill_version is not None
    assert told.fill_version.tolist() == [asked.tolist(), [LO, LO, -1 - LO, -1 - LO] * 2]


# ---- transitions


def test_the_largest_difference_goes_first_and_who_is_on_the_way_is_not_named():
    counts = np.zeros((LAYERS, EXPERTS), int)
    counts[0, :3], counts[1, :3] = [9, 8, 7], [90, 80, 1]
    policy = DynaExq(alpha=0, margin=0)
    start = policy.init(spec(capacity=(6, 16)))
    resident = np.zeros((LAYERS, EXPERTS), bool)
    resident[:, 5:] = True
    state = np.full(resident.shape, State.RESIDENT, np.int8)
    state[1, 0], state[1, 5] = State.PROMOTING, State.DEMOTING
    _, decision = policy.decide(start, observed(counts, resident, state))
    assert decision.transitions is not None
    assert [tuple(t) for t in decision.transitions] == [
        *((1, 1, HI), (1, 6, LO)),
        *((0, 0, HI), (0, 5, LO)),
        *((0, 1, HI), (0, 6, LO)),
        *((0, 2, HI), (0, 7, LO)),
        *((1, 2, HI), (1, 7, LO)),
    ]


def test_absent_experts_fill_what_is_wanted():
    counts = np.zeros((LAYERS, EXPERTS), int)
    counts[:, :N] = 5
    policy = DynaExq(paged=True)
    check_policies([policy], "device")
    seen = observed(counts, np.zeros((LAYERS, EXPERTS), bool))
    assert seen.version is not None
    absent = dataclasses.replace(seen, version=np.full_like(seen.version, -1))
    _, decision = policy.decide(policy.init(spec(capacity=(6, 16))), absent)
    assert decision.transitions == ()
    np.testing.assert_array_equal(decision.fill_version, np.where(counts > 0, HI, LO))


# ---- the start


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 1.0}, "alpha must lie from 0 to below 1, not 1.0"),
        ({"margin": -0.1}, "margin must be a number from 0 up"),
        ({"slack": -1}, "slack must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DynaExq(**fields)


def test_what_belongs_to_another_model_is_refused():
    with pytest.raises(ValueError, match="scores is of 3 layers × 8 experts, this model has 2 × 8"):
        DynaExq(scores=np.ones((3, 8))).init(spec(capacity=(6, 16)))
    one = {"dense": np.full(LAYERS, 100)}
    with pytest.raises(ValueError, match="needs a high and a low version, the larger first"):
        DynaExq().init(spec(version_bytes=one, capacity=(6,)))
    with pytest.raises(ValueError, match="says no capacity by version; start it with precision"):
        DynaExq().init(spec())
    with pytest.raises(PolicyError, match="interval '16 bytes' is not a number of"):
        check_policies([DynaExq(interval="16 bytes")], "device")


def test_dynaexq_follows_the_capacity_at_once():
    """n falls and rises between intervals; who goes is the coldest, who comes the hottest."""
    where = resident([[1] * 4, [1] * 4], 10, capacity=(6, 8))
    policy = DynaExq(resized=True, margin=0.0, alpha=0.0)
    state = policy.init(spec_for(where))
    counts = np.array([[9, 5, 7, 1], [2, 8, 4, 6]], np.int32)
    version, resting = np.ones((2, 4), np.int8), np.ones((2, 4), np.int8)

    def asked(moment: Moment, capacity: int, **more):
        nonlocal state
        seen = Observation(
            *(moment, 1, 1, 1, -1, -1, 0.0),
            capacity=capacity,
            version=version,
            state=resting,
            **more,
        )
        state, decision = policy.decide(state, seen)
        return decision.transitions

    queue = asked(Moment.INTERVAL, 6, counts=counts)
    assert {(t.layer, t.expert) for t in queue} == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)}
    version[...] = 1 - state.high
    assert asked(Moment.STEP_END, 6, counts=counts) is None
    queue = asked(Moment.STEP_END, 4, counts=9 - counts)
    assert {tuple(t) for t in queue} == {(0, 1, 1), (1, 2, 1)}, "by the interval's scores"
    version[...] = 1 - state.high
    queue = asked(Moment.STEP_END, 5, counts=counts)
    assert {tuple(t) for t in queue} == {(0, 1, 0)}
    assert DynaExq().moments == {Moment.INTERVAL} and "capacity" not in DynaExq().needs


# ---- maps


def test_maps_have_as_many_high_experts_as_there_is_room_for():
    values = np.arange(16.0).reshape(2, 8)
    assert (top_map(values, 7) == HI).sum(axis=1).tolist() == [4, 3]
    assert (random_map(2, 8, 6, 1) == HI).sum(axis=1).tolist() == [3, 3]
    np.testing.assert_array_equal(random_map(2, 8, 6, 1), random_map(2, 8, 6, 1))
    assert any(np.any(random_map(2, 8, 6, 1) != random_map(2, 8, 6, s)) for s in range(2, 5))


# ---- names


def test_names(tmp_path):
    assert precision_of(None).versions == ("dense",) and not precision_of(None).lossy
    assert precision_of("int4").versions == ("int4",) and precision_of("int4").lossy
    transit = precision_of("lossless12,in_transit=true")
    assert transit.in_transit and not transit.lossy
    hot = precision_of("dynaexq,alpha=0.25,slack=2,interval=8 steps,hi_share=50%")
    assert hot.versions == ("dense", "int4") and hot.hi_share == 0.5 and hot.lossy
    assert hot.spares == 1 and precision_of("dynaexq,spares=4").spares == 4
    assert hot.policy == DynaExq(alpha=0.25, slack=2, interval="8 steps")
    assert not precision_of("dynaexq,lo=lossless12").lossy
    given_map = np.array([[0, 1], [1, 0]])
    np.save(tmp_path / "map.npy", given_map)
    fixed = precision_of(f"map={tmp_path / 'map.npy'},hi=int8,lo=int2")
    np.testing.assert_array_equal(fixed.start(2, 2, 2), given_map)
    np.save(tmp_path / "scores.npy", [[3.0, 1.0], [1.0, 3.0]])
    warm = precision_of(f"dynaexq,scores={tmp_path / 'scores.npy'}")
    np.testing.assert_array_equal(warm.start(2, 2, 2), given_map)
    drawn = precision_of("random,seed=4").start(3, 8, 6)
    np.testing.assert_array_equal(drawn, random_map(3, 8, 6, 4))
    assert precision_of("random", seed=5).seed == 5


def test_traces_in_the_place_of_files(tmp_path):
    """The experts that most tokens chose are high; scores are an interval's, in the mean."""
    routed = random_routing(np.random.default_rng(1), 20, 4, 8, 2, rows=3)
    trace = write_trace(tmp_path / "t", routed, 8)
    counts = np.zeros((4, 8))
    for ids in routed:
        np.add.at(counts, (np.arange(4)[:, None], ids), 1)
    fixed = precision_of(f"map={trace.directory},hi_share=0.25")
    np.testing.assert_array_equal(fixed.start(4, 8, 8), top_map(counts, 8))
    for interval, share in (("6 tokens", 0.1), ("5 steps", 0.25)):
        warm = precision_of(f"dynaexq,interval={interval},scores={trace.directory}").policy
        assert warm is not None and warm.scores is not None
        np.testing.assert_allclose(warm.scores, counts * share)
    timeless = write_trace(tmp_path / "u", routed, 8, absent=("step.start_s", "step.read_s"))
    with pytest.raises(ValueError, match=r"has no step\.read_s: it was converted or generated"):
        precision_of(f"dynaexq,interval=1 seconds,scores={timeless.directory}")
    with pytest.raises(ValueError, match="is no trace"):
        precision_of(f"map={tmp_path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4,interval=1 steps", "precision 'int4' has no setting 'interval=1 steps'"),
        ("lossless12,in_transit=1", "in_transit='1' is not true or false"),
        ("random,interval=1 steps", "precision 'random' has no setting 'interval=1 steps'"),
        ("dynaexq,alpha=hot", "alpha='hot' is not a number"),
        ("dynaexq=file", "precision 'dynaexq' takes no file; leave out =file"),
        ("dynaexq,scores=/none.npy", "/none.npy: cannot be read as a scores"),
        ("dynaexq,hi=int4,lo=int8", "hi=int4 must have more bytes than lo=int8"),
        ("dynaexq,hi=fp8", "hi='fp8' is not one of checkpoint, dense"),
        ("dynaexq,hi_share=1.5", "hi_share='1.5' is not a share from 0 to 1"),
        ("map", "precision 'map' needs a map or the trace of a run: map=FILE"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        precision_of(text)


def test_maps_that_are_none_are_refused(tmp_path):
    path = tmp_path / "map.npy"
    for array, message in (
        (np.zeros(4, int), "a map is an array"),
        (np.full((2, 2), -1), "only finite numbers from 0 up"),
        (np.full((2, 2), 2), "a map has version numbers from 0 to 1"),
        (np.zeros((2, 2)), "as integers"),
        (np.array([None]), "cannot be read as a map"),
    ):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(ValueError, match=message):
            precision_of(f"map={path}")
    np.save(path, np.zeros((2, 2), int))
    with pytest.raises(ValueError, match="precision 'map' takes no hi_share"):
        precision_of(f"map={path},hi_share=0.5")
    with pytest.raises(
        ValueError, match="the map is of 2 layers × 2 experts, this model has 3 × 2"
    ):
        precision_of(f"map={path}").start(3, 2, 9)
