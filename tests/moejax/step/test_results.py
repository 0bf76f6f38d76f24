"""The one array that the host reads of a step, and tokens chosen row by row."""

import functools

import jax
import numpy as np
import pytest

from moejax.step.results import Results, ResultShape
from moejax.step.sampler import sample, update_rows
from pallas_kernels.sample import greedy


@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("experts", [5, 32, 70])
def test_everything_packed_is_found_again(experts, versions):
    rng = np.random.default_rng(experts)
    layers, shape = 3, ResultShape(4, 6, 3, experts, versions)
    tokens, routes = rng.integers(0, 99, 4, np.int32), rng.integers(0, 9, 5, np.int32)
    paging = rng.integers(0, 50, (layers, 4), np.int32)
    missed = rng.random((layers, experts)) < 0.5
    words = np.zeros((layers, -(-experts // 32)), np.uint32)
    for layer, expert in np.argwhere(missed):
        words[layer, expert // 32] |= np.uint32(1) << np.uint32(expert % 32)
    demand = rng.integers(0, 9, (layers, 2, versions), np.int32)
    parts = [paging, words.view(np.int32)] + [demand.reshape(layers, -1)] * (versions > 1)
    packed = np.asarray(shape.pack(tokens, routes, np.concatenate(parts, axis=1)))
    found = Results(shape, packed)
    assert packed.shape == (shape.size,) and packed.dtype == np.int32
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.missed_routes, [*routes, 0])
    np.testing.assert_array_equal(np.stack(found.paging, axis=1), paging)
    np.testing.assert_array_equal(found.missed, missed)
    assert found.totals == tuple(paging.sum(axis=0))
    assert (found.demand is None) == (versions == 1)
    if versions > 1:
        np.testing.assert_array_equal(found.demand, demand)
    chosen = np.arange(4, dtype=np.int32)
    other = Results(shape, np.asarray(shape.with_tokens(packed, chosen)))
    np.testing.assert_array_equal(other.tokens, chosen)
    np.testing.assert_array_equal(other.values[4:], packed[4:])


def test_row_by_row_is_the_choice_of_all_rows():
    """Also where truncation is skipped, and for logits of the first rows alone."""
    rng, rows, vocabulary = np.random.default_rng(0), 6, 1003
    tokens = np.full(rows, -5, np.int32)
    choose = {
        by_row: {
            "greedy": jax.jit(functools.partial(update_rows, greedy, by_row=by_row)),
            "sample": jax.jit(
                functools.partial(
                    update_rows, functools.partial(sample, one_row=by_row), by_row=by_row
                )
            ),
        }
        for by_row in (False, True)
    }
    for _ in range(15):
        logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3
        update = rng.random(rows) < 0.6
        params = (
            rng.choice([0, 0.3, 1], rows).astype(np.float32),
            rng.choice([0, 1, 40], rows).astype(np.int32),
            rng.choice([1, 0.5, 0.95], rows).astype(np.float32),
            rng.choice([0, 0.05], rows).astype(np.float32),
            rng.integers(0, 2**32, rows).astype(np.uint32),
            rng.integers(0, 1000, rows).astype(np.int32),
        )
        for name, given in (("greedy", ()), ("sample", params)):
            one, all_rows = (
                np.asarray(choose[by_row][name](logits, tokens, update, *given))
                for by_row in (True, False)
            )
            np.testing.assert_array_equal(one, all_rows, err_msg=name)
            assert (one[~update] == -5).all() and (one[update] >= 0).all()
    first = np.asarray(choose[True]["greedy"](logits[:2], tokens, np.arange(rows) < 2))
    np.testing.assert_array_equal(first, [*np.argmax(logits[:2], axis=1), *[-5] * 4])
    np.testing.assert_array_equal(
        first, np.asarray(choose[False]["greedy"](logits[:2], tokens, np.arange(rows) < 2))
    )
