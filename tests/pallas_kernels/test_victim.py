"""The victim key: the same integers in numpy, in XLA and by definition, without overflow."""

import itertools

import jax
import numpy as np

from pallas_kernels.plan import victim_key
from pallas_kernels.plan.victim import MAX_PRIOR, MAX_WEIGHT
from tests.pallas_kernels import pager

INT_MAX = 2**31 - 1


def both(function, *arguments) -> np.ndarray:
    """The function's values in numpy, which XLA's must equal."""
    values = function(*arguments)
    compiled = jax.jit(function)(*arguments)
    assert compiled.dtype == np.int32
    np.testing.assert_array_equal(compiled, values)
    return values


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
