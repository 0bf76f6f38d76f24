"""Exact answers by precision."""

import pytest

from scripts.bench import answers
from tests.scripts.runs import json_lines, refusal

MIXED = "hi=int8,lo=int2,hi_share=50%"


@pytest.mark.slow
def test_each_precision_has_its_answers(capsys):
    small = "--model", "demo", "--count", "2", "--seeds", "2", "--tokens", "6"
    precisions = "int8", "int2", f"map=own,{MIXED}", f"random,seed=each,{MIXED}"
    precisions = *precisions, "cache_aware_routing=buddies=train,spread=0%,cover=100%"
    rows = json_lines(capsys, answers.main, *small, "--precision", *precisions)
    first, low, *mixed, stand_in = rows
    assert [row["precision"] for row in rows] == [*precisions]
    assert first["above"] == 0 and low["above_low"] < low["above"] < low["above_high"]
    assert low["above"] > 0
    assert low["mb"] < min(row["mb"] for row in mixed) < first["mb"] + 1
    for row in mixed:
        assert first["perplexity"] < row["perplexity"] < low["perplexity"]
    # Half of the experts are resident, and tokens that miss others take these.
    assert stand_in["mb"] == pytest.approx(first["mb"], rel=0.1) and stand_in["above"] > 0
    assert {"arithmetic", "python"} < {*first} and first["over"] == 0
    assert "is none of arithmetic" in refusal(capsys, answers.main, "--domains", "chess")
