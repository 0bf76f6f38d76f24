"""Exact answers by precision."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import answers
from tests.scripts.runs import json_lines, refusal

MIXED = "hi=int8,lo=int2,hi_share=50%"


def test_traces_of_one_s_own_may_begin_like_ours():
    for precision, found in (
        ("buddies=train", "buddies=T"),
        ("map=own,hi=int8", "map=T,hi=int8"),
        ("buddies=train_dir,spread=0.0", "buddies=train_dir,spread=0.0"),
        ("map=own/trace,hi=int8", "map=own/trace,hi=int8"),
    ):
        assert answers.with_traces(precision, lambda: Path("T")) == found


def test_a_share_s_interval_is_of_shares(monkeypatch):
    found = {"right": np.array([[0.0], [0.02], [0.1]]), "bits": np.ones((3, 1)), "mb": 1.0}
    monkeypatch.setattr(answers.Answers, "rows", lambda *_: {**found, "transitions": None})
    args = argparse.Namespace(precision=["int2"], domains=["arithmetic"])
    (row,) = answers.compare(args)
    assert (row["low"], row["right"]) == (0, pytest.approx(0.04)) and 0.1 < row["high"] < 0.2


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
