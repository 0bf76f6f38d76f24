"""Sampling, whose PTX is XLA's but for the searches."""

import jax
import numpy as np
import pytest

from moejax.step import sampler
from tests.ptx.program import interpret

pytestmark = pytest.mark.aot

ROWS, VOCABULARY = 4, 1003


def given(rng, truncate):
    """sampler.sample's arguments; truncate: bool[R], the rows that leave tokens out."""
    logits = rng.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)
    temperature = rng.choice([0.4, 1.0, 1.7], ROWS).astype(np.float32)
    top_k = np.where(truncate, 1, 0).astype(np.int32)
    top_p = np.where(truncate, 0.5, 1).astype(np.float32)
    min_p = rng.choice([0.0, 0.1], ROWS).astype(np.float32)
    seed = rng.integers(0, 2**32, ROWS).astype(np.uint32)
    return logits, temperature, top_k, top_p, min_p, seed, np.arange(ROWS, dtype=np.int32)


@pytest.mark.parametrize(
    "implementation", ["pallas", pytest.param("xla", marks=pytest.mark.nightly)]
)
def test_rows_that_truncate_nothing_have_the_tokens_of_both_programs(implementation):
    """To the bit: one searches thresholds, for the rows beside them, and the other does not."""
    searching = interpret(sampler.sample, implementation=implementation)
    without = interpret(sampler.sample, truncates=False)
    rng, differ = np.random.default_rng(26), 0
    for _ in range(3):
        truncate = np.arange(ROWS) % 2 == 0
        arguments = given(rng, truncate)
        beside, alone = np.asarray(searching(*arguments)), np.asarray(without(*arguments))
        np.testing.assert_array_equal(beside, jax.jit(sampler.sample)(*arguments))
        np.testing.assert_array_equal(alone[~truncate], beside[~truncate])
        differ += (alone != beside).sum()
    assert differ  # those that truncate
