import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from moejax.step import sampler
from pallas_kernels import sample as ops
from pallas_kernels.truncate import reference

OPTIONS = {"xla_allow_excess_precision": False}
greedy = jax.jit(ops.greedy, compiler_options=OPTIONS)
sample = jax.jit(sampler.sample, compiler_options=OPTIONS)
sample_all = jax.jit(functools.partial(sampler.sample, truncates=False), compiler_options=OPTIONS)


SEARCHES = {
    search.__name__: jax.jit(search, compiler_options=OPTIONS)
    for search in (reference.by_halves, reference.by_sixteenths)
}
"""That of CPUs, which `kept` takes here, and that of GPUs."""
logprobs = jax.jit(ops.logprobs, static_argnums=2, compiler_options=OPTIONS)
adjust = jax.jit(sampler.adjust, compiler_options=OPTIONS)
tally = jax.jit(sampler.tally, compiler_options=OPTIONS)
recount = jax.jit(sampler.recount, compiler_options=OPTIONS)


ROWS, VOCABULARY = 6, 64
"""Of most tests, so that they share what is compiled."""


def _parameters(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
    )


def _seeds(rows):
    return np.arange(rows, dtype=np.uint32), np.arange(rows, dtype=np.int32)


def _reference(logits, temperature, top_k, top_p, min_p):
    """One row in float64 by sorting: (kept, how near top-p was to another answer)."""
    scaled = (logits - logits.max()).astype(np.float32) / np.float32(temperature)
    mass = np.exp(scaled.astype(np.float64))
    keep = mass >= min_p
    if top_k > 0:
        alive = np.sort(scaled[keep])[::-1]
        keep &= scaled >= alive[min(top_k, len(alive)) - 1]
    margin = np.inf
    if top_p < 1:
        values = np.unique(scaled[keep])[::-1]
        above = np.array([mass[keep & (scaled > value)].sum() for value in values])
        above /= mass[keep].sum()
        keep &= scaled >= values[above < top_p][-1]
        margin = np.abs(above - top_p).min()
    return keep, margin


def _distances(rng, rows, vocabulary):
    """(their bits, mass) of logits with equal values, infinities and one row of nothing else."""
    logits = np.round(rng.normal(0, 4, (rows, vocabulary)), 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 9  # the likeliest
    logits[-1, 1:] = -np.inf
    scaled = logits - logits.max(axis=1, keepdims=True)
    return np.abs(scaled).view(np.int32), np.exp(scaled)


@pytest.mark.parametrize(
    "vocabulary", [96, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 5000))]
)
def test_both_searches_find_the_same_threshold(vocabulary):
    rng, rows = np.random.default_rng(vocabulary), 16
    distance, mass = _distances(rng, rows, vocabulary)
    halves, sixteenths = SEARCHES.values()
    keep = mass >= 0.01 * rng.random((rows, 1))
    # Of every size, and more than there are.
    counts = rng.integers(0, vocabulary + 2, rows).astype(np.int32)
    counts[:2] = 1, vocabulary
    found = np.asarray(halves(distance, keep, counts))
    np.testing.assert_array_equal(sixteenths(distance, keep, counts), found)
    for row in range(rows):
        near = np.sort(distance[row][keep[row]])
        if 0 < counts[row] <= len(near):
            assert found[row, 0] == near[counts[row] - 1]

    # Sums of these are exact, in whatever order.
    exact = np.floor(mass * 1024) / np.float32(1024)
    target = (rng.random(rows) * 1.1 * exact.sum(axis=1)).astype(np.float32)
    target[0] = exact[0].sum()
    found = np.asarray(halves(distance, exact, target))
    np.testing.assert_array_equal(sixteenths(distance, exact, target), found)
    for row in range(rows):
        if 0 < target[row] <= exact[row].sum():
            near = distance[row] <= found[row]
            assert exact[row][near].sum() >= target[row]
            assert exact[row][distance[row] < found[row]].sum() < target[row]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_that_truncate_nothing_have_the_same_tokens_without_searches(data):
    """To the bit, whatever was computed beside them."""
    rows, vocabulary = 16, data.draw(st.sampled_from([1, 1003]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 5
    temperature = rng.choice([0.0, 0.4, 1.0, 1.7], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.2], rows).astype(np.float32)
    seed, position = rng.integers(0, 2**32, rows).astype(np.uint32), np.arange(rows, dtype=np.int32)
    top_k, top_p = rng.choice([-1, 0], rows).astype(np.int32), np.ones(rows, np.float32)
    assert not ops.truncates_any(top_k, top_p)
    alone = sample_all(logits, temperature, top_k, top_p, min_p, seed, position)
    top_k[::2], top_p[::4] = 2, 0.5  # company that truncates
    assert ops.truncates_any(top_k, top_p)
    beside = sample(logits, temperature, top_k, top_p, min_p, seed, position)
    np.testing.assert_array_equal(np.asarray(alone)[1::2], np.asarray(beside)[1::2])


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([[1, 5, 5, 2], [0, -0.0, -1, -2]], np.float32)
    assert greedy(logits).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_temperature_zero_is_greedy_and_leaves_other_rows_alone(temperature):
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    logits[0] = 1.0
    parameters = _parameters(ROWS)
    random = np.asarray(sample(logits, *parameters, *_seeds(ROWS)))
    parameters[0][::2] = temperature
    mixed = np.asarray(sample(logits, *parameters, *_seeds(ROWS)))
    np.testing.assert_array_equal(mixed[::2], greedy(logits)[::2])
    np.testing.assert_array_equal(mixed[1::2], random[1::2])


def test_the_users_setting_of_threefry_changes_no_token():
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    operands = logits, *_parameters(ROWS), *_seeds(ROWS)
    expected = sample(*operands).tolist()
    with jax.threefry_partitionable(False):
        assert sample(*operands).tolist() == expected


def test_the_lowest_temperatures_do_not_overflow():
    logits = np.full((ROWS, VOCABULARY), -300, np.float32)
    logits[:, :2] = 300, 299
    parameters = _parameters(ROWS, temperature=1e-5, top_p=0.9, top_k=2)
    assert sample(logits, *parameters, *_seeds(ROWS)).tolist() == [0] * ROWS


@pytest.mark.parametrize(
    "parameters",
    [
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=1.0, min_p=0.1),
        dict(temperature=0.9, min_p=0.02, top_k=9, top_p=0.95),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(parameters, vary):
    draws, vocabulary = 20_000, 12
    row = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32)
    columns = _parameters(draws, **parameters)
    seed, position = np.full(draws, 7, np.uint32), np.full(draws, 7, np.int32)
    counter = seed if vary == "seed" else position
    counter[:] = np.arange(draws)
    tokens = np.asarray(sample(np.tile(row, (draws, 1)), *columns, seed, position))

    keep, _ = _reference(row, *(column[0] for column in columns))
    scaled = row.astype(np.float64) / columns[0][0]
    expected = special.softmax(np.where(keep, scaled, -np.inf)) * draws
    observed = np.bincount(tokens, minlength=vocabulary)
    assert observed[~keep].sum() == 0
    squares = (observed[keep] - expected[keep]) ** 2 / expected[keep]
    assert special.chdtrc(keep.sum() - 1, squares.sum()) > 1e-3  # Pearson's test


def test_a_draw_is_a_function_of_seed_and_position():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    seed, position = np.array([1, 1, 1, 2, 3, 3], np.uint32), np.array([5, 5, 6, 5, 7, 7], np.int32)
    tokens = sample(logits, *_parameters(ROWS), seed, position).tolist()
    assert tokens[0] == tokens[1] and tokens[4] == tokens[5]
    assert len(set(tokens[:4])) == 3


@pytest.mark.parametrize("n", [0, 1, 20])
def test_logprobs_of_raw_logits(n):
    rng = np.random.default_rng(3)
    logits = np.round(rng.normal(0, 4, (9, 200)), 1).astype(np.float32)  # with equal values
    tokens = rng.integers(0, 200, 9).astype(np.int32)
    tokens[:3] = np.argmax(logits[:3], axis=1)
    chosen, rank, top_ids, top = (np.asarray(x) for x in logprobs(logits, tokens, n))
    assert (chosen.dtype, rank.dtype, top_ids.dtype, top.dtype) == ("f4", "i4", "i4", "f4")
    assert top_ids.shape == top.shape == (9, n)

    expected = special.log_softmax(logits.astype(np.float64), axis=-1)
    order = np.argsort(-logits, axis=-1, kind="stable")
    rows = np.arange(9)
    np.testing.assert_allclose(chosen, expected[rows, tokens], atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(order[rows, rank - 1], tokens)
    np.testing.assert_array_equal(top_ids, order[:, :n])
    np.testing.assert_allclose(
        top, np.take_along_axis(expected, order[:, :n], -1), atol=2e-6, rtol=1e-6
    )
    assert (rank[:3] == 1).all()


# ---- penalties and biases


def _adjustments(rng, rows, vocabulary, biases=5):
    """Arguments of adjust; a fifth of the rows is neutral, a fifth has no biases."""
    logits = rng.normal(0, 4, (rows, vocabulary)).astype(np.float32)
    counts = (rng.integers(0, 4, logits.shape) * (rng.random(logits.shape) < 0.3)) << 1
    counts |= rng.random(logits.shape) < 0.3
    repetition, presence, frequency = (
        rng.uniform(*bounds, rows).astype(np.float32) for bounds in ((0.3, 3), (-2, 2), (-2, 2))
    )
    neutral = rng.random(rows) < 0.2
    repetition[neutral], presence[neutral], frequency[neutral] = 1, 0, 0
    ids = np.array([rng.choice(vocabulary, biases, replace=False) for _ in range(rows)])
    ids[rng.random(ids.shape) < 0.3] = -1
    ids[rng.random(rows) < 0.2] = -1
    bias = rng.choice([-np.inf, -100.0, 0.5, 100.0], ids.shape).astype(np.float32)
    penalties = repetition, presence, frequency
    return logits, counts.astype(np.int32), *penalties, ids.astype(np.int32), bias


def _adjust_logits(logits, counts, repetition, presence, frequency, ids, bias):
    """vLLM's formulas, token by token, in float64."""
    result = logits.astype(np.float64)
    for row in range(len(result)):
        for token, value in zip(ids[row], bias[row], strict=True):
            if token >= 0:
                result[row, token] += value
        for token in range(result.shape[1]):
            count, in_prompt = counts[row, token] >> 1, counts[row, token] & 1
            x = result[row, token]
            if count or in_prompt:
                x = x / repetition[row] if x > 0 else x * repetition[row]
            x -= frequency[row] * count
            result[row, token] = x - presence[row] * (count > 0)
    return result


def test_adjusted_logits_follow_the_formulas():
    arguments = _adjustments(np.random.default_rng(5), 40, 50)
    result = np.asarray(adjust(*arguments))
    np.testing.assert_allclose(result, _adjust_logits(*arguments), rtol=1e-6, atol=1e-5)
    assert np.isneginf(result).any()


def test_a_neutral_row_keeps_every_bit():
    rng = np.random.default_rng(6)
    logits, counts, *penalties, ids, bias = _adjustments(rng, 8, 64)
    logits[:, :4] = [-0.0, 0.0, 1e-40, -1e-40]
    for array, neutral in zip(penalties, (1, 0, 0), strict=True):
        array[:4] = neutral
    ids[:4] = -1
    result = np.asarray(adjust(logits, counts, *penalties, ids, bias))
    np.testing.assert_array_equal(result[:4].view(np.uint32), logits[:4].view(np.uint32))
    assert (result[4:] != logits[4:]).any(axis=1).all()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_tally_and_recount_agree(data):
    rows, vocabulary, longest = 3, 11, 12
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=longest // 2)
    row, prompt, output = data.draw(st.integers(0, rows - 1)), data.draw(tokens), data.draw(tokens)
    before = np.full((rows, vocabulary), 9, np.int32)

    def counted(output):
        ids = np.full(longest, -1, np.int32)
        ids[: len(prompt) + len(output)] = prompt + output
        is_output = np.arange(longest) >= len(prompt)
        return recount(before, np.int32(row), ids, is_output)

    counts = counted([])
    for token in output:
        # The rows that are not updated have tokens too.
        counts = tally(counts, np.full(rows, token, np.int32), np.arange(rows) == row)
    np.testing.assert_array_equal(counts, counted(output))
    expected = before.copy()
    expected[row] = np.bincount(output, minlength=vocabulary) * 2
    expected[row] += np.isin(np.arange(vocabulary), prompt)
    np.testing.assert_array_equal(counts, expected)
