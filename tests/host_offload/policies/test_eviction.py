"""Eviction policies by name."""

import dataclasses

import numpy as np
import pytest

from host_offload.control.controller import Controller
from host_offload.policies.eviction import hot_table, static
from host_offload.policies.eviction.names import EVICTION
from host_offload.simulate.simulator import simulate
from pallas_kernels.plan.victim import MAX_WEIGHT
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.traces.traces_of import write_trace


def test_weights():
    assert EVICTION["lru"] == (1, 0, 0)
    assert EVICTION["lfu"] == (0, 1, 0)


@pytest.mark.parametrize("eviction", EVICTION)
def test_weights_are_within_what_the_key_can_hold(eviction):
    assert all(abs(weight) <= MAX_WEIGHT for weight in EVICTION[eviction])


def test_a_static_set_is_learned_from_a_trace(tmp_path):
    """The hottest first in each layer, ties by id."""
    routed = [np.array([[[3, 1], [0, 2]], [[3, 2], [2, 3]]]), np.array([[[2, 3], [0, 2]]])]
    trace = write_trace(tmp_path / "trace", [np.sort(ids) for ids in routed], 4)
    assert static.fit(trace).hot == ((3, 2, 1, 0), (2, 0, 3, 1))


# ---- the hot table


def test_the_table_is_ranked_over_all_layers():
    counts = np.array([[9, 8, 7, 6], [5, 1, 0, 0], [2, 2, 2, 2]])
    assert hot_table.shared_by_rank(counts, 5).tolist() == [4, 1, 0]
    assert hot_table.shared_by_rank(counts, 5, least=1).tolist() == [3, 1, 1]
    assert hot_table.shared_by_rank(counts, 99).tolist() == [4, 4, 4]


def test_a_table_is_learned_from_a_trace_and_simulated(tmp_path):
    """All of layer 0 is used evenly, one expert of layer 1: once the cells have moved the table has
    three experts of layer 0 and one of layer 1, and nobody else comes in."""
    routed = [np.array([[[i % 3], [3]]]) for i in range(40)]
    trace = write_trace(tmp_path / "trace", routed, 4)
    policy = hot_table.fit(trace)
    assert policy.counts == ((14, 13, 13, 0), (0, 0, 0, 40))
    hot = simulate(trace, policies=(policy,), cells=2)
    flat = simulate(trace, policies=(static.fit(trace),), cells=2)
    assert hot.misses[-20:].sum() == 0 < flat.misses[-20:].sum()


def test_a_table_leaves_spare_cells_to_who_comes_ahead(tmp_path):
    """Experts 0, 1, 2 of layer 0 in turn, in three cells each layer of which one is spare: two are
    hot and hit, the third is read through and gets no cell; nobody is staged."""
    routed = [np.array([[[i % 3], [3]]]) for i in range(60)]
    trace = write_trace(tmp_path / "trace", routed, 4)
    table = dataclasses.replace(
        hot_table.beside_prefetches(1), counts=hot_table.fit(trace).counts, least=3
    )
    found = simulate(trace, policies=(table,), cells=3)
    assert found.misses[-30:, 0].sum() == found.read_through[-30:, 0].sum() == 10
    assert found.control is not None and not found.control["transfers"]
    whole = dataclasses.replace(table, spare=0)
    assert simulate(trace, policies=(whole,), cells=3).misses[-30:].sum() == 0


def test_a_table_of_another_model_is_refused():
    with pytest.raises(ValueError, match="counts are of 1×2 experts, and the model has 2 layers"):
        Controller(spec(), [hot_table.HotTable(counts=((1, 2),))])
    with pytest.raises(ValueError, match="give no hot"):
        Controller(spec(), [hot_table.HotTable(hot=((1,), (2,)))])
