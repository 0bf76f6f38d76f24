"""Exact answers by precision."""

import math

import pytest

from scripts.bench import answers
from tests.scripts.runs import json_lines, refusal

MIXED = "hi=int8,lo=int2,hi_share=50%"


def test_intervals_are_students():
    mean, low, high = answers.over_seeds([0.5, 0.7, 0.6])
    # t of two degrees of freedom is 4.303, and the standard error 0.1 / √3.
    assert (mean, high - mean) == pytest.approx((0.6, 4.3027 * 0.1 / math.sqrt(3)), rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert answers.over_seeds([0.5])[0] == 0.5 and math.isnan(answers.over_seeds([0.5])[1])


@pytest.mark.slow
def test_each_precision_has_its_answers(capsys):
    small = "--model", "demo", "--count", "2", "--seeds", "2", "--tokens", "6"
    precisions = "int8", "int2", f"map=own,{MIXED}", f"random,seed=each,{MIXED}"
    rows = json_lines(capsys, answers.main, *small, "--precision", *precisions)
    first, low, *mixed = rows
    assert [row["precision"] for row in rows] == [*precisions]
    assert first["above"] == 0 and low["above_low"] < low["above"] < low["above_high"]
    assert low["above"] > 0
    assert low["mb"] < min(row["mb"] for row in mixed) < first["mb"] + 1
    for row in mixed:
        assert first["perplexity"] < row["perplexity"] < low["perplexity"]
    assert {"arithmetic", "python"} < {*first} and first["over"] == 0
    assert "is none of arithmetic" in refusal(capsys, answers.main, "--domains", "chess")
