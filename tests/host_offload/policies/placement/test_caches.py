"""Residents that change: who goes, in HybriMoE's, Fate's and ExpertFlow's rule; the step size."""

import numpy as np
import pytest

from host_offload.policies.placement.caches import Horizon, LayerLru, ScoreCache, TwoLevelLru

pytestmark = pytest.mark.slow  # numpy


def table(*keys, layers=3, experts=4) -> np.ndarray:
    resident = np.zeros((layers, experts), bool)
    for key in keys:
        resident[key] = True
    return resident


def rows(*tokens) -> np.ndarray:
    return np.array(tokens)


def test_scores_are_halved_and_the_newest_of_the_top_are_added():
    cache = ScoreCache.of(table((0, 0)), top_k=1)
    assert cache.top == 2
    cache = cache.routed(0, rows(6, 3, 1, 0), ())
    assert cache.scores[0].tolist() == [0.3, 0.15, 0, 0]  # the third is not of the top
    cache = cache.routed(0, rows(0, 0, 8, 2), ())
    assert cache.scores[0].tolist() == [0.15, 0.075, 0.4, 0.1]
    assert not cache.scores[1:].any()


def test_the_least_score_of_the_layer_goes():
    cache = ScoreCache.of(table((0, 0), (0, 1), (1, 2)), top_k=2)
    cache = cache.routed(0, rows(1, 2, 4, 0), ())
    assert cache.victim((0, 2), ()) == (0, 0)
    assert cache.victim((0, 2), {(0, 0)}) == (0, 1)
    assert cache.victim((0, 2), {(0, 0), (0, 1)}) is None  # nobody of another layer
    assert cache.victim((2, 0), ()) is None


def test_the_least_recently_used_of_the_layer_goes():
    cache = LayerLru.of(table((0, 0), (0, 1), (1, 2)), top_k=2)
    cache = cache.routed(0, rows(1, 0, 0, 0), ()).routed(0, rows(0, 9, 0, 0), ())
    assert cache.victim((0, 2), ()) == (0, 0)
    assert cache.victim((0, 2), {(0, 0)}) == (0, 1)
    assert cache.victim((2, 2), ()) is None


def test_whom_no_layer_ahead_wants_goes_first_wherever_it_is():
    cache = TwoLevelLru.of(table((0, 0), (1, 1), (2, 2)), top_k=1)
    cache = cache.routed(2, rows(0, 0, 1, 0), ()).routed(0, rows(1, 0, 0, 0), {(1, 1)})
    # (1, 1) was never used but is wanted; of the others (2, 2) was used before (0, 0).
    assert cache.victim((1, 3), ()) == (2, 2)
    assert cache.victim((1, 3), {(2, 2)}) == (0, 0)
    assert cache.victim((1, 3), {(2, 2), (0, 0)}) is None  # nobody needed as soon goes
    assert cache.victim((0, 3), {(2, 2), (0, 0)}) == (1, 1)  # but somebody needed later
    # Once the layer is over nobody is wanted there any more.
    over = cache.routed(1, rows(0, 1, 0, 0), ()).routed(2, rows(0, 0, 1, 0), ())
    assert over.victim((2, 0), {(2, 2), (0, 0)}) == (1, 1)


@pytest.mark.parametrize("make", [ScoreCache, LayerLru, TwoLevelLru])
def test_an_expert_takes_the_victim_s_place_and_the_old_value_stays(make):
    cache = make.of(table((0, 0)), 1)
    after = cache.swapped((0, 0), (1, 3))
    assert np.argwhere(after.resident).tolist() == [[1, 3]]
    assert np.argwhere(cache.resident).tolist() == [[0, 0]]
    for victim, key in (((0, 1), (1, 1)), ((0, 0), (0, 0))):
        with pytest.raises(ValueError, match="cannot take the place of"):
            cache.swapped(victim, key)


def test_the_step_size_begins_with_the_link_and_follows_what_came_of_it():
    # Three loads of 4 s while a layer of 5 s passes: 2.4 layers.
    assert Horizon.of(3, 4.0, 5.0, most=6).steps == 3
    assert Horizon.of(0, 4.0, 5.0, most=6).steps == 1
    assert Horizon.of(99, 4.0, 5.0, most=6).steps == 6
    horizon = Horizon(3, 2)
    assert horizon.adjusted(1, 1).steps == 3  # who waits reaches farther, whatever came for nothing
    assert horizon.adjusted(0, 1).steps == 1
    assert horizon.adjusted(0, 0).steps == 2
    assert Horizon(3, 3).adjusted(1, 0).steps == 3 and Horizon(3, 1).adjusted(0, 2).steps == 1
    for layer_s, most in ((0.0, 3), (1.0, 0)):
        with pytest.raises(ValueError, match="a step size needs layers"):
            Horizon.of(1, 1.0, layer_s, most)
