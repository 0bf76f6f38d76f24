"""The victim key: the same integers in numpy, in XLA and by definition, without overflow."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.plan import LOG2_UNIT, log2_fixed, victim_key
from pallas_kernels.plan.victim import MAX_PRIOR, MAX_WEIGHT
from tests.pallas_kernels import pager

INT_MAX = 2**31 - 1
POWERS = sorted({min(2**k + d, INT_MAX) for k in range(32) for d in (-1, 0, 1)})
EDGES = np.int32([-INT_MAX - 1, -INT_MAX, -2, -1, *POWERS])
"""Both ends of int32, zero, and the neighbourhood of every power of two."""


def both(function, *arguments) -> np.ndarray:
    """The function's values in numpy, which XLA's must equal."""
    values = function(*arguments)
    compiled = jax.jit(function)(*arguments)
    assert compiled.dtype == np.int32
    np.testing.assert_array_equal(compiled, values)
    return values


def test_log2_at_the_edges():
    want = [pager.log2_fixed(max(int(x), 1)) for x in EDGES]
    np.testing.assert_array_equal(both(log2_fixed, EDGES), want)


@given(st.lists(st.integers(1, INT_MAX), min_size=8, max_size=8))
def test_log2_anywhere(numbers):
    got = both(log2_fixed, np.int32(numbers))
    np.testing.assert_array_equal(got, [pager.log2_fixed(x) for x in numbers])
    assert np.all(np.abs(got / LOG2_UNIT - np.log2(numbers)) < 0.087)


def test_log2_is_exact_at_powers_and_never_decreases():
    powers = 2 ** np.arange(31, dtype=np.int32)
    np.testing.assert_array_equal(log2_fixed(powers), LOG2_UNIT * np.arange(31))
    small = np.arange(1, 2**17, dtype=np.int32)
    steps = np.diff(log2_fixed(small))
    # Frequencies below 2^12 all differ, so LFU is exact there.
    assert np.all(steps >= 0) and np.all(steps[: 2**12 - 1] > 0)
    assert np.all(np.diff(log2_fixed(np.int32(POWERS[1:]))) >= 0)


def test_key_at_the_extremes():
    """Every combination of extreme ages, frequencies, priors and weights, against Python's
    unbounded integers: nothing overflows."""
    counts = (1, 2, 3, 4095, 4096, 2**30, INT_MAX - 1, INT_MAX)
    frequencies = (0, 1, 2, 4095, 4096, 2**30, INT_MAX - 1)
    priors = (-MAX_PRIOR, -1, 0, 1, MAX_PRIOR)
    age, frequency, prior = np.int32(list(itertools.product(counts, frequencies, priors))).T
    extremes = (-MAX_WEIGHT, 0, 1, MAX_WEIGHT)
    for weights in itertools.product(extremes, repeat=3):
        got = both(victim_key, age, frequency, prior, np.int32(weights))
        want = [
            weights[1] * pager.log2_fixed(1 + int(f))
            - weights[0] * pager.log2_fixed(int(a))
            + weights[2] * int(p)
            for a, f, p in zip(age, frequency, prior, strict=True)
        ]
        assert max(map(abs, want)) <= INT_MAX
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("weights", "ascending"),
    [
        ((1, 0, 0), [(9, 0, 0), (8, 5, 0), (1, 0, 0)]),  # LRU: the oldest first
        ((0, 1, 0), [(1, 2, 0), (9, 3, 0), (1, 9, 0)]),  # LFU: the least frequent first
        ((0, 0, 1), [(1, 9, -3), (1, 9, 0), (9, 0, 7)]),  # the lowest prior first
        ((1, 1, 0), [(8, 0, 0), (4, 1, 0), (1, 7, 0)]),  # LFRU: log frequency − log age
    ],
)
def test_key_orders_as_the_policy_says(weights, ascending):
    age, frequency, prior = np.int32(ascending).T
    keys = both(victim_key, age, frequency, prior, np.int32(weights))
    assert np.all(np.diff(keys) > 0)
