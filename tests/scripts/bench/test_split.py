"""Half experts beside whole ones."""

import pytest

from scripts.bench import split
from tests.scripts.runs import json_lines, refusal


@pytest.mark.slow
def test_each_memory_has_three_arms(capsys):
    rows = json_lines(capsys, split.main, "--tokens", "12", "--memories", "0.25")
    whole, half, moepic = rows
    assert [row["name"] for row in rows] == ["whole", "half", "MoEpic"]
    assert whole["top"] == "1" and half["top"] == "0.5" and half["hits"] > whole["hits"]
    assert all(row["ahead_mb"] >= row["mb"] for row in rows)
    assert moepic["ms"] > 0 and whole["ahead_ms"] < whole["ms"]
    assert "shares above 0 and up to 1, not 2" in refusal(capsys, split.main, "--memories", "2")
