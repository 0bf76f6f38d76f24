"""What a process that serves a checkpoint keeps resident is measured, and held to one copy."""

import json

import pytest

from scripts.cpu import memory, pages
from tests.pallas_kernels.contract import NATIVE

COMPILED = 400e6
"""Bytes, with room, that python, jax and what it compiles take here beside weights and KV: some 170
MB beyond those before the start."""


@NATIVE
@pytest.mark.nightly
def test_a_second_copy_is_seen(tmp_path, capsys):
    """The weights are 269 MB, and a cell of this shape holds a page of KV: cells take 1.6 GB."""
    small = [str(tmp_path), "--shape", "demo", "--size", "256MiB", "--tokens", "2", "--json"]
    own = []
    for more in ([], ["--eviction", "lru"]):
        assert memory.main([*small, *more]) == 1, "jax alone is beyond the bound of so few weights"
        found = json.loads(capsys.readouterr().out)
        assert (found["in_place"] > 0) == (not more)
        rss = found["rss"]
        own.append(rss["after steps"] - rss["before"] - found["weights"] - found["kv"])
    assert own[0] < COMPILED < own[1]


@NATIVE
@pytest.mark.nightly
def test_both_kinds_of_pages_are_timed(tmp_path, capsys):
    tiny = ["--shape", "demo", "--size", "8MiB", "--rounds", "2", "--tokens", "3"]
    assert pages.main([str(tmp_path), *tiny]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["huge / small"] > 0 and found["huge, ms a step"] > 0


def test_they_refuse_what_cannot_be(tmp_path, capsys):
    for command, wrong in ((memory, ("--tokens", "1")), (pages, ("--rounds", "0"))):
        assert command.main([str(tmp_path), *wrong]) == 2
        assert "must be at least" in capsys.readouterr().err
    assert memory.main([str(tmp_path), "--shape", "none"]) == 2
    assert "unknown" in capsys.readouterr().err
