"""fMoE's ablation: which searches of expert maps raise the hit rate."""

import pytest

from scripts.bench import maps
from tests.scripts.runs import json_lines, refusal


@pytest.mark.slow
def test_each_search_adds_its_part(capsys):
    small = "--model", "demo", "--count", "6", "--seeds", "2", "--prompt", "32", "--tokens", "16"
    rows = {row["name"]: row for row in json_lines(capsys, maps.main, *small)}
    assert [*rows] == [*maps.ARMS, "r, semantic", "r, trajectory"]
    for row in rows.values():
        assert row["value_low"] < row["value"] < row["value_high"] and -1 < row["value"] < 1
    # The demo has four layers, so three ahead all but the semantic search predict the last alone.
    assert rows["with semantics"]["over"] > 0.02 and rows["r, semantic"]["value"] > 0.2
    assert rows["with δ"]["moved"] > rows["with semantics"]["moved"] > rows["trajectory"]["moved"]
    assert "is none of story, chat" in refusal(capsys, maps.main, "--domains", "chess")
