"""Code between layers that is written for speed decides as its straightforward form."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from host_offload.policies.eviction.arc import Directory
from host_offload.policies.prefetch.moe_infinity import row_lengths, similarity
from host_offload.policies.prefetch.next_layers import multiply_rows, rank_chosen

SCORES = st.lists(st.integers(-3, 3), min_size=6, max_size=6)


@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 6))
def test_arc_orders_experts_as_evicting_them_one_by_one(references, cells):
    directory = Directory()
    for expert in references:
        directory = directory.reference(expert, cells)
    now, order = directory, []
    while now.once or now.often:
        after = now._evict()
        order += {*now.once, *now.often} - {*after.once, *after.often}
        now = after
    assert directory.order() == tuple(order)


@given(SCORES, st.integers(1, 6))
def test_the_chosen_of_one_row_are_those_of_the_row_twice(scores, k):
    row = np.array([scores], np.float32)
    assert rank_chosen(row, k) == rank_chosen(np.concatenate([row, row]), k)


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_few_rows_are_multiplied_alike_in_any_order(count, seed):
    rng = np.random.default_rng(seed)
    rows, weights = (rng.standard_normal(shape, np.float32) for shape in ((count, 40), (40, 24)))
    order, product = rng.permutation(count), multiply_rows(rows, weights)
    np.testing.assert_allclose(product, rows @ weights, rtol=1e-4, atol=1e-4)
    assert np.array_equal(multiply_rows(rows[order], weights), product[order])


def test_known_lengths_change_no_similarity():
    rng = np.random.default_rng(0)
    collection = rng.random((5, 3, 4), np.float32)
    collection[2, 1] = 0
    found = similarity(collection, collection[2], row_lengths(collection))
    assert found.tolist() == similarity(collection, collection[2]).tolist()
