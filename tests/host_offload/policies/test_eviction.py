"""Eviction policies page as their definitions in plain Python, and are found by name."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.controller import Controller
from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.policies.eviction import static
from host_offload.policies.eviction.belady import belady_of
from host_offload.policies.eviction.eviction_names import (
    EVICTION,
    POLICIES,
    with_eviction,
)
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.static import Static
from host_offload.simulate.bounds import min_transfers, read_references
from host_offload.simulate.simulator import simulate
from tests.host_offload.control.policy_runs import EXPERTS, LAYERS, scripted, spec
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.traces.traces_of import random_routing, write_trace


@pytest.fixture
def run(tmp_path):
    """Steps over policies, on a device in plain Python: the device after them."""

    def runs(policies, sets, cells: int) -> LayeredDevice:
        device = LayeredDevice(Controller(spec(), policies), cells)
        routed = [np.sort(np.array([step])) for step in sets]
        device.run(write_trace(tmp_path / str(len(list(tmp_path.iterdir()))), routed, EXPERTS))
        return device

    return runs


def test_names():
    layered = {"lru", "lfu", "lfru", "fifo", "static", "hot-table"}
    assert set(POLICIES) == {*layered, "global-lru", "global-lfu", "global-lfru"}
    assert EVICTION == {"lru": (1, 0, 0), "lfu": (0, 1, 0), "lfru": (1, 1, 0)}
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'; known: lru, lfu, lfru, g"):
        POLICIES.parse("mru")
    mine, other = scripted(writes={"victim_weights"}), scripted(writes={"stages"})
    assert with_eviction(None, [other]) == ("lru", (POLICIES.parse("lru"), other))
    assert with_eviction(None, [other, mine]) == ("Scripted", (other, mine))
    assert with_eviction("fifo", [mine]) == ("fifo", (FIFO(), mine))
    with pytest.raises(ValueError, match="policies must be a list of policies, not Scripted"):
        with_eviction(None, mine)


# ---- weights


SEQUENCES = {
    "zipf": lambda rng, step: rng.zipf(1.6, rng.integers(1, 5)) % 16,
    "drifting": lambda rng, step: (step // 6 + rng.integers(0, 6, 4)) % 16,
    "cyclic": lambda rng, step: np.arange(3 * step, 3 * step + 3) % 16,
}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_lru_and_lfu_are_the_textbooks(eviction, sequence):
    """LFU: the least often active goes, of equals the least recently used, of these the lowest id.
    A step's experts stay, and what finds no cell is read through."""
    rng = np.random.default_rng(0)
    sets = [{*map(int, SEQUENCES[sequence](rng, step))} for step in range(60)]
    for capacity in (3, 4, 7, 11):
        pager = Pager(cold_tables(np.array([capacity]), 16, EVICTION[eviction]))
        resident: set[int] = set()
        frequency: Counter[int] = Counter()
        last: dict[int, int] = {}
        for step, active in enumerate(sets):
            missing, kept = active - resident, active & resident
            for e in sorted(missing):
                idle = resident - active
                if len(resident) == capacity and idle:
                    order = [(frequency[i] * (eviction == "lfu"), last[i], i) for i in idle]
                    resident.remove(min(order)[2])
                if len(resident) < capacity:
                    resident.add(e)
                    kept.add(e)
            found = pager.reference(np.isin(np.arange(16), [*active])[None])
            assert set(np.flatnonzero(found.missing[0])) == missing
            assert set(np.flatnonzero(pager.tables.address[0] >= 0)) == resident
            frequency.update(active)
            last.update(dict.fromkeys(kept, step))


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


def test_fifo_is_exact_where_the_lag_cannot_matter(run):
    """Six cells and two experts a step: there are always older ones than those of two steps."""
    routed = random_routing(np.random.default_rng(0), 60, LAYERS, EXPERTS, 2)
    sets = [step[0].tolist() for step in routed]
    simulation = run([FIFO()], sets, cells=6)
    for layer in range(LAYERS):
        got = [set(np.flatnonzero(missed[layer]).tolist()) for missed in simulation.missed]
        assert got == fifo_misses(sets, 6, layer)


@pytest.mark.parametrize("driver", ["device", "host"])
def test_belady_moves_hardly_more_than_min(tmp_path, driver):
    """A control that knows the run is at the bound that `simulate.bounds` computes; a step's own
    experts keep their cells, so not quite where cells are few."""
    trace = write_trace(
        tmp_path / "t", random_routing(np.random.default_rng(1), 80, LAYERS, EXPERTS, 3), EXPERTS
    )
    references, policy = read_references(trace), belady_of(trace)
    for cells, most in ((3, 1.1), (5, 1.03), (7, 1.0)):
        moved = simulate(trace, policies=[policy], cells=cells, driver=driver).transfers.sum()
        least = min_transfers(references, cells).sum()
        assert least <= moved <= most * least
        assert (
            cells == 7 or moved < 0.7 * simulate(trace, cells=cells, driver=driver).transfers.sum()
        )
    with pytest.raises(ValueError, match="the future is of a model with"):
        policy.init(dataclasses.replace(spec(), experts=EXPERTS + 1))


# ---- static


def test_static_keeps_the_experts_of_its_warm_up_and_lets_no_other_in(run):
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


def test_static_brings_a_given_hot_set_in(run):
    counts = ((0, 0, 0, 0, 0, 1, 2, 3), (0, 0, 1, 2, 3, 0, 0, 0))
    simulation = run([Static(counts=counts)], [[[0, 1], [0, 1]], [[2, 3], [5, 6]]] * 5, cells=2)
    assert simulation.resident(0) == {7, 6} and simulation.resident(1) == {4, 3}
    assert simulation.control.controller.stats()["transfers"]["hot"]["done"] == 4


def test_counts_of_another_model_are_refused():
    with pytest.raises(ValueError, match="counts are of 1×2 experts, and the model has 2 la"):
        Controller(spec(), [Static(counts=((1, 2),))])


# ---- the tutorial's


def test_recent_prefetch_restores_what_was_used_before(run):
    """LFU holds on to what was popular once, and newcomers evict each other; the policy brings
    them back in place of the old ones, so that nothing is missed in the end."""
    once, now = ([[[e], [e]] for e in experts] for experts in ((0, 1, 2, 3), (4, 5, 6, 7)))
    pattern = once * 9 + now * 6
    plain = run([POLICIES.parse("lfu")], pattern, cells=4)
    ahead = run([POLICIES.parse("lfu"), RecentPrefetch(window=4)], pattern, cells=4)
    assert all(missed.sum() == LAYERS for missed in plain.missed[-6:])
    assert not any(missed.any() for missed in ahead.missed[-6:])


# ---- the hot table


def test_the_table_is_ranked_over_all_layers():
    counts = np.array([[9, 8, 7, 6], [5, 1, 0, 0], [2, 2, 2, 2]])
    assert static.share_by_rank(counts, 5).tolist() == [4, 1, 0]
    assert static.share_by_rank(counts, 5, least=1).tolist() == [3, 1, 1]
    assert static.share_by_rank(counts, 99).tolist() == [4, 4, 4]


def test_a_table_is_learned_from_a_trace_and_leaves_spare_cells_to_who_comes_ahead(tmp_path):
    """Experts 0, 1, 2 of layer 0 in turn, one of layer 1. Once the cells have moved the table has
    all four. Of three cells each, of which one is spare, two are hot and hit; the third is read
    through and gets no cell, and nobody is staged."""
    routed = [np.array([[[i % 3], [3]]]) for i in range(60)]
    trace = write_trace(tmp_path / "trace", routed, 4)
    policy = static.HotTable.fit(trace)
    assert isinstance(policy, static.HotTable)
    assert policy.counts == Static.fit(trace).counts == ((20, 20, 20, 0), (0, 0, 0, 60))
    hot = simulate(trace, policies=(policy,), cells=2)
    flat = simulate(trace, policies=(Static.fit(trace),), cells=2)
    assert hot.misses[-20:].sum() == 0 < flat.misses[-20:].sum()
    table = dataclasses.replace(static.hot_beside_prefetches(1), counts=policy.counts, least=3)
    found = simulate(trace, policies=(table,), cells=3)
    assert found.misses[-30:, 0].sum() == found.read_through[-30:, 0].sum() == 10
    assert found.control is not None and not found.control["transfers"]
