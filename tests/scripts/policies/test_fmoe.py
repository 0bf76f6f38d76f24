"""The commands beside fMoE's experiments run, and its definitions name what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from host_offload.policies.prefetch.names import prefetch_policy
from host_offload.traces.reader import read_trace
from moejax.models.json_values import parse_yaml
from scripts.policies import fit, search

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


def test_sizes_that_are_none_are_refused(capsys, tmp_path):
    assert search.main([*SMALL, "--batches", "one"]) == 2
    assert "--batches are numbers such as 1,8,32, not one" in capsys.readouterr().err
    assert search.main([*SMALL, "--capacity", "0"]) == 2
    assert "sizes must be positive" in capsys.readouterr().err
    assert fit.main([str(tmp_path), "--tokens", "0"]) == 2
    assert "sizes must be at least 1" in capsys.readouterr().err


def test_fit_writes_a_file_of_each_that_learns(tmp_path, capsys, repository):
    """And each file that a definition of fMoE's names is one of them."""
    sizes = ["--sequences", "3", "--prompt-tokens", "16", "--tokens", "8", "--capacity", "50"]
    sizes += ["--hidden", "8"]
    assert fit.main([str(tmp_path), *sizes, "--texts", "story"]) == 0
    written = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(capsys.readouterr().out.splitlines()) == len(written) == 7
    assert read_trace(tmp_path / "trace").complete
    files = 0
    for path in (repository / "scripts" / "experiments").glob("fmoe_*.yaml"):
        for policy in parse_yaml(path.read_text())["policies"]:
            name, given, file = policy.partition("=")
            if given and "(" not in name:
                files += 1
                assert Path(file).name in written
                prefetch_policy(f"{name}={tmp_path / Path(file).name}")
    assert files > 10
