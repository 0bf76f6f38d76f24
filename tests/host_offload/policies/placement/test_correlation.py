"""Who is chosen after whom."""

import numpy as np
import pytest

from host_offload.policies.placement.correlation import correlated, successors

pytestmark = pytest.mark.slow  # numpy


def test_successors_are_counted_by_pairs_of_a_token_s_experts():
    # Expert 0 is followed by 2 and 3, twice by 3; expert 1 by 2, 3 and 3.
    ids = np.array([[[0, 1], [2, 3], [0, 0]], [[0, 1], [3, 3], [1, 1]]], np.int16)
    found = successors(ids, 4, 2)
    assert found.shape == (2, 4, 2)
    assert found[0, 0].tolist() == [3, 2] and found[0, 1].tolist() == [3, 2]
    assert found[1, 2, 0] == 0 and found[1, 3].tolist() == [1, 0]


def test_an_expert_s_rows_go_to_each_of_its_successors():
    after = np.array([[[1, 2], [0, 1], [2, 0]]])
    tokens = np.array([[[5, 0, 2], [9, 9, 9]]])
    found = correlated(tokens, after)
    assert found.shape == (1, 2, 1, 3)
    assert found[0, 0, 0].tolist() == [2, 5, 7] and not found[0, 1].any()


def test_two_layers_that_follow_each_other_are_predicted_right():
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 6, (50, 1, 1)), axis=-1).repeat(3, axis=1).astype(np.int16)
    ids[:, 1] = (ids[:, 0] + 1) % 6
    tokens = np.zeros((1, 3, 6), int)
    for layer in range(3):
        tokens[0, layer] = np.bincount(ids[:, layer].ravel(), minlength=6)
    found = correlated(tokens, successors(ids, 6, 1))
    assert np.array_equal(found[0, 0, 0], tokens[0, 1])
