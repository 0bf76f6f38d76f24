"""Predictors of the next layer's experts."""

import numpy as np
import pytest

from scripts.bench import predictors
from tests.scripts.runs import json_lines, refusal


def test_hot_experts_are_those_of_32_tokens():
    """Two experts a token of eight. Predicted are 0 and 1 for all, then 6 and 7 of equal ones."""
    scores = np.zeros((64, 8))
    scores[:, :2] = 2.0, 1.0
    scores[:16, 2:4] = 3.0, 3.0  # of the first 32 tokens half want 2 and 3
    later = np.tile([0, 1], (64, 1))
    # 0 to 3 are told, and in truth 0 and 1 alone are hot, as the others have no token.
    assert predictors.hot_hits(scores, later) == pytest.approx((2 / 4 + 2 / 4) / 2)
    later[:32] = np.arange(32)[:, None] % 4 + [0, 1]  # 0 to 4
    assert predictors.hot_hits(scores, later) == pytest.approx((4 / 4 + 2 / 4) / 2)


@pytest.mark.slow
def test_each_layer_has_each_predictor(capsys):
    small = "--model", "demo", "--count", "6", "--seeds", "2", "--length", "64"
    sizes = "--width", "16", "--epochs", "2", "--domains", "arithmetic", "python"
    rows = json_lines(capsys, predictors.main, *small, *sizes)
    assert [row["layer"] for row in rows] == [1, 2, 3, "mean"]
    for row in rows:
        for name in predictors.NAMES:
            assert 0.25 < row[name] < 1 and row[f"{name}_low"] < row[name] < row[f"{name}_high"]
    assert "is none of story, chat, arithmetic" in refusal(
        capsys, predictors.main, "--domains", "chess"
    )
