"""Two runs compared: pairs, their interval, and what cannot be paired."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from moejax.commands.eval import format_comparison
from moejax.errors import UserError
from moejax.evaluate.comparison import Units, compare_lines, compare_units, over_seeds


def units(sums, weights=None, name="a.txt", figure="bits/token", key="k"):
    weights = [1.0] * len(sums) if weights is None else weights
    keys = [f"{key}{i}" for i in range(len(sums))]
    return Units(name, figure, keys, list(sums), list(weights))


def line(*given, step=None):
    return {"step": step, "asked": {}, "units": [dataclasses.asdict(one) for one in given]}


def test_intervals_are_students():
    mean, low, high = over_seeds([0.5, 0.7, 0.6])
    # t of two degrees of freedom is 4.303, and the standard error 0.1 / √3.
    assert (mean, high - mean) == pytest.approx((0.6, 4.3027 * 0.1 / math.sqrt(3)), rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert over_seeds([0.5])[0] == 0.5 and math.isnan(over_seeds([0.5])[1])


def test_the_interval_is_the_paired_t_without_students_correction():
    a, b = units([4.0, 2.0, 9.0]), units([5.0, 2.5, 9.0])
    found = compare_units(a, b)
    d = np.array([1.0, 0.5, 0.0])
    half = 1.959964 * d.std(ddof=1) / math.sqrt(3)
    assert (found.a, found.b, found.difference) == pytest.approx((5.0, 5.5, 0.5))
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert found.pairs == 3


def test_nineteen_of_twenty_intervals_hold_the_truth():
    """Windows of unlike length, whose differences share nothing but their mean."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        weights = rng.integers(20, 200, 60).astype(float)
        a = weights * rng.normal(6.0, 1.0, 60)
        b = a + weights * 0.02 + np.sqrt(weights) * rng.normal(0.0, 0.4, 60)
        found = compare_units(units(a, weights), units(b, weights))
        held += found.low <= 0.02 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_texts_are_compared_one_by_one_and_together():
    a = line(units([1.0, 2.0]), units([5.0, 6.0], name="b.txt", key="m"))
    b = line(units([2.0, 3.0], name="other.txt"), units([5.0, 6.0], name="b.txt", key="m"))
    found = compare_lines([a], [b])
    assert [(one.name, one.difference, one.pairs) for one in found] == [
        ("a.txt", 1.0, 2),
        ("b.txt", 0.0, 2),
        ("all", 0.5, 4),
    ]


def test_runs_are_compared_at_equal_steps():
    a = [line(units([1.0, 2.0]), step=step) for step in (1, 2, 4)]
    b = [line(units([1.0, 2.0 + step]), step=step) for step in (2, 4, 8)]
    found = compare_lines(a, b)
    steps = [(one.step_a, one.step_b, one.difference) for one in found]
    assert steps == [(2, 2, 1), (4, 4, 2), (None, None, 1.5)]
    assert found[-1].pairs == 2  # steps share their windows
    (_, *rows) = format_comparison(found).splitlines()
    assert [row.split()[1] for row in rows] == ["2", "4", "all"]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([line(units([1.0]))], [line(units([1.0], key="m"))], "no windows or documents in common"),
        (
            [line(units([1.0]), step=1), line(units([1.0]), step=2)],
            [line(units([1.0]), step=3)],
            "no step in common: 1, 2 beside 3",
        ),
    ],
)
def test_runs_without_pairs_are_refused(a, b, message):
    with pytest.raises(UserError, match=message):
        compare_lines(a, b)


def test_units_that_are_not_the_same_are_refused():
    with pytest.raises(UserError, match="did not score the same windows"):
        compare_units(units([1.0, 2.0]), units([1.0]))
    with pytest.raises(UserError, match="weigh the same windows or documents differently"):
        compare_units(units([1.0]), units([1.0], [2.0]))
