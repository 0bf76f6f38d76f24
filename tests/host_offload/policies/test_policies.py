"""The policies that come with moejax, and the tutorial's, over a simulated pager."""

import copy
import pickle

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.controller import Controller
from host_offload.control.interface import Moment
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.names import (
    EVICTION,
    PER_LAYER,
    POLICIES,
    eviction_policy,
    with_eviction,
)
from host_offload.policies.eviction.static import Static
from tests.host_offload.control.policy_runs import (
    LAYERS,
    Simulation,
    random_sets,
    scripted,
    seen,
    spec,
)


def run(policies, sets, cells: int, **changes) -> Simulation:
    """All steps over those policies, to the last read."""
    simulation = Simulation(Controller(spec(**changes), policies), cells)
    for step in sets:
        simulation.step(*step)
    while simulation.pending:
        simulation.read()
    return simulation


# ---- by name


def test_names():
    assert set(PER_LAYER) == {"lru", "lfu", "lfru", "fifo", "static", "hot-table"}
    assert set(POLICIES) == {*PER_LAYER, "global-lru", "global-lfu", "global-lfru"}
    assert EVICTION == {"lru": (1, 0, 0), "lfu": (0, 1, 0), "lfru": (1, 1, 0)}
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'; known: lru, lfu, lfru, g"):
        eviction_policy("mru")


@pytest.mark.parametrize("name", EVICTION)
def test_policies_that_are_weights_ask_for_nothing(name):
    policy = eviction_policy(name)
    controller = Controller(spec(), [policy])
    assert not controller.moments and not controller.needs_residency
    np.testing.assert_array_equal(controller.take_update()["victim_weights"], EVICTION[name])


def test_eviction_is_the_users_where_a_policy_writes_the_weights():
    mine, other = scripted(writes={"victim_weights"}), scripted(writes={"stages"})
    assert with_eviction(None, [other]) == ("lru", (eviction_policy("lru"), other))
    assert with_eviction(None, [other, mine]) == ("Scripted", (other, mine))
    assert with_eviction("fifo", [mine]) == ("fifo", (FIFO(), mine))
    with pytest.raises(ValueError, match="policies must be a list of policies, not Scripted"):
        with_eviction(None, mine)


# ---- FIFO


def fifo_misses(sets, capacity: int, layer: int) -> list[set[int]]:
    """Textbook: a queue in order of insertion, by id within a step."""
    queue: list[int] = []
    misses = []
    for step in sets:
        active = set(step[layer])
        missing = sorted(active - set(queue))
        for expert in missing:
            if len(queue) == capacity:
                queue.remove(next(e for e in queue if e not in active))
            queue.append(expert)
        misses.append(set(missing))
    return misses


@pytest.mark.parametrize("seed", range(4))
def test_fifo_is_exact_where_the_lag_cannot_matter(seed):
    """Six cells and two experts a step: there are always older ones than those of two steps."""
    sets = random_sets(np.random.default_rng(seed), 60)
    simulation = run([FIFO()], sets, cells=6)
    for layer in range(LAYERS):
        got = [set(np.flatnonzero(missed[layer]).tolist()) for missed in simulation.missed]
        assert got == fifo_misses(sets, 6, layer)


def test_fifo_is_not_lru():
    """Expert 0 is used in every step, and still leaves when it is the oldest."""
    sets = [[[0, e], [0, e]] for e in (1, 2, 3, 4, 5, 6, 7)]
    # A step without expert 0, in which it can go.
    sets.append([[1, 2], [1, 2]])
    fifo, lru = (run([p], sets, cells=6) for p in (FIFO(), eviction_policy("lru")))
    assert 0 not in fifo.resident(0) and 0 in lru.resident(0)


def test_among_the_newcomers_of_two_steps_the_least_recently_used_goes():
    """What the lag means: 0 came first, and 1 was used less recently."""
    sets = [[[e], [e]] for e in (0, 1, 0, 2)]
    simulation = Simulation(Controller(spec(), [FIFO()]), 2, age=4)
    for step in sets:
        simulation.step(*step)
    assert simulation.resident(0) == {0, 2}
    exact = Simulation(Controller(spec(), [FIFO()]), 2, age=0)
    for step in sets:
        exact.step(*step)
    assert exact.resident(0) == {1, 2}


def test_fifo_decides_only_when_somebody_came_or_went():
    simulation = run([FIFO()], [[[0, 1], [2, 3]]] * 5, cells=6)
    assert simulation.control.controller.stats()["decisions"] == {"FIFO": 1}


# ---- static


def test_static_keeps_the_experts_of_its_warm_up_and_lets_no_other_in():
    warm = [[[0, 1], [5, 6]], [[0, 2], [5, 7]], [[0, 1], [5, 6]]]
    # By turns, because a step's list takes no cell whose owner the step used.
    later = [[[3, 4], [0, 1]], [[5, 6], [2, 3]], [[7, 3], [4, 0]]] * 4
    simulation = run([Static(warmup=3)], warm + later, cells=2)
    assert simulation.resident(0) == {0, 1} and simulation.resident(1) == {5, 6}
    # What is not hot is read through, again and again, once the two steps of lag are over.
    for missed in simulation.missed[-4:]:
        assert missed[0].sum() == missed[1].sum() == 2
    stats = simulation.control.controller.stats()
    assert stats["decisions"] == {"Static": 2} and stats["queued"] == 0


def test_static_brings_a_given_hot_set_in():
    hot = ((7, 6, 5), (4, 3, 2))
    simulation = run([Static(hot=hot)], [[[0, 1], [0, 1]], [[2, 3], [5, 6]]] * 5, cells=2)
    assert simulation.resident(0) == {7, 6} and simulation.resident(1) == {4, 3}
    assert simulation.control.controller.stats()["transfers"]["hot"]["done"] == 4


def test_static_follows_a_budget_that_moves():
    simulation = Simulation(Controller(spec(), [Static(hot=((7, 6, 5), (4, 3, 2)))]), 2)
    for e in (0, 1, 2) * 3:
        simulation.step([e], [5 + e])
    assert simulation.resident(0) == {7, 6} and simulation.resident(1) == {4, 3}
    for layer in range(LAYERS):
        rows = [cell.row for cell in simulation.device.memory.pagers[layer].cells]
        simulation.device.memory.pagers[layer].regrant([*rows[:2], 1000 + layer, *rows[3:]])
    simulation.device.memory.arena = np.pad(simulation.device.memory.arena, ((0, 2000), (0, 0)))
    for e in (0, 1, 2) * 2:
        simulation.step([e], [5 + e])
    assert simulation.resident(0) == {7, 6, 5} and simulation.resident(1) == {4, 3, 2}


@pytest.mark.parametrize(
    ("hot", "match"),
    [
        (((0,),), "hot names experts of 1 layers, not 2"),
        (((0,), (8,)), r"hot\[1\] must be different experts in 0…7"),
        (((0, 0), (1,)), r"hot\[0\] must be different"),
    ],
)
def test_static_refuses_experts_that_do_not_exist(hot, match):
    with pytest.raises(ValueError, match=match):
        Controller(spec(), [Static(hot=hot)])


# ---- the tutorial's


def test_recent_prefetch_restores_what_was_used_before():
    """LFU holds on to what was popular once, and newcomers evict each other; the policy brings
    them back in place of the old ones, so that nothing is missed in the end."""
    once, now = ([[[e], [e]] for e in experts] for experts in ((0, 1, 2, 3), (4, 5, 6, 7)))
    pattern = once * 9 + now * 6
    plain = run([eviction_policy("lfu")], pattern, cells=4)
    ahead = run([eviction_policy("lfu"), RecentPrefetch(window=4)], pattern, cells=4)
    assert all(missed.sum() == LAYERS for missed in plain.missed[-6:])
    assert not any(missed.any() for missed in ahead.missed[-6:])
    counts = ahead.control.controller.stats()["transfers"]["recent"]
    assert counts["used"] > 0 and counts["done"] == counts["used"] + counts["unused"]


# ---- contract 5


PURE = [*(factory() for factory in PER_LAYER.values()), Static(warmup=5), RecentPrefetch()]


@pytest.mark.parametrize("policy", PURE, ids=lambda p: type(p).__name__)
def test_policies_are_pure(policy):
    """The same observations give the same decisions, and no state is changed in place."""
    everything = policy.needs or {"counts"}
    recorder = scripted(needs=everything, moments=policy.moments or {Moment.STEP_END})
    simulation = run([recorder], random_sets(np.random.default_rng(3), 20), cells=3)
    observations = seen(simulation.control.controller)
    assert len(observations) == 20

    def decisions(policy):
        state, made = policy.init(spec()), []
        for observation in observations:
            before = pickle.dumps((state, observation))
            kept = state
            state, decision = policy.decide(state, observation)
            assert pickle.dumps((kept, observation)) == before
            made.append(pickle.dumps(decision))
        return made

    first = decisions(policy)
    assert (
        first == decisions(copy.deepcopy(policy)) == decisions(pickle.loads(pickle.dumps(policy)))
    )
    assert hash(policy) == hash(copy.deepcopy(policy))


def test_an_impure_policy_would_be_noticed():
    class Counts(FIFO):
        def decide(self, state, observation):
            state += 1
            return state, super().decide(state, observation)[1]

    with pytest.raises(AssertionError):
        test_policies_are_pure(Counts())
