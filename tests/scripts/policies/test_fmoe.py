"""The command beside fMoE's experiments runs."""

from __future__ import annotations

import json

import pytest

from scripts.policies import search

pytestmark = pytest.mark.slow

SMALL = ["--layers", "4", "--experts", "8", "--hidden", "8", "--capacity", "20", "--top-k", "2"]


def test_search_says_what_comes_late(capsys):
    arguments = [*SMALL, "--batches", "1,3", "--repeats", "1", "--json"]
    assert search.main([*arguments, "--layer-us", "0"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["batch"] for line in lines] == [1, 3]
    for line in lines:
        assert line["within"] == "late" and line["fastest_us"] <= line["layer_us"]
        assert line["layer_us"] <= line["slowest_us"]
        # Of a map its probabilities, the lengths of its prefixes and an embedding.
        assert line["store_bytes"] == 20 * 4 * (4 * 8 + 4 + 8)
    assert search.main([*arguments, "--layer-us", "1e9"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["within"] == "yes"


def test_sizes_that_are_none_are_refused(capsys):
    assert search.main([*SMALL, "--batches", "one"]) == 2
    assert "--batches are numbers such as 1,8,32, not one" in capsys.readouterr().err
    assert search.main([*SMALL, "--capacity", "0"]) == 2
    assert "sizes must be positive" in capsys.readouterr().err
