"""moejax beside another engine under a limit of memory, with what both need at its smallest."""

import json
import os
import sys

import pytest

from moejax.checkpoints.convert import convert
from scripts.cpu.engines import checkpoint
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.disk import peer
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.cpu.test_peers import SMALL
from tests.scripts.disk.test_store import writable
from tests.scripts.runs import refusal


def test_it_refuses_what_cannot_be(capsys, tmp_path):
    assert "--rounds must be at least 1" in refusal(
        capsys, peer.main, str(tmp_path), "--rounds", "0"
    )
    said = refusal(capsys, peer.main, str(tmp_path), "--llama-python", sys.executable)
    assert "pip install llama-cpp-python" in said


def another(python, source, path, *options):
    """In the place of llama.cpp's file: the same weights for the same engine, all in memory."""
    assert options == ("consumed",)
    convert(source, path)


@NATIVE
@pytest.mark.slow
@pytest.mark.skipif(not writable(), reason="no memory controller that can be written")
def test_two_engines_in_turn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "DRAWN", 10_007)
    monkeypatch.setattr(peer, "OLMOE", OLMOE | SMALL)
    monkeypatch.setitem(peer.ENGINES, "llama.cpp", "moejax_engine")
    monkeypatch.setattr(peer, "why_not_llama", lambda _: None)
    monkeypatch.setattr(peer, "write_gguf", another)
    given = ["--layers", "2", "--limit", "2GiB", "--host-memory", "1MiB", "--rounds", "2"]
    assert peer.main([str(tmp_path), *given, "--tokens", "2", "--json", "--delete"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours, theirs = found["rows"]
    assert (
        ours["read"] > 0 == theirs["read"] and "median difference 0.0000" in found["agreement"][0]
    )
    assert all(0 < row["resident"] < 2148 and row["cgroup"] < 2148 for row in found["rows"])
    assert all(row["ms"] > 0 and row["compute"] > 0 for row in found["rows"])
    middle = found["bars"]["step / max(compute, disk)"][0]
    assert middle > 0 and found["bars"]["share, moejax"][0] > 0
    lines = peer.report(found)
    assert sum("bar" in line for line in lines) == 3
    assert not os.listdir(tmp_path)


def test_bars_are_those_of_the_rounds():
    ours = {"ms": 300.0, "compute": 100.0, "read": 500.0, "rate": 1000.0, "plain": 2000.0}
    theirs = {"ms": 900.0, "compute": 1.0, "read": 700.0, "rate": 500.0, "plain": 1000.0}
    found = peer.bars([{"moejax": ours, "llama.cpp": theirs}])
    assert {name: middle for name, (middle, _, _) in found.items()} == {
        "share, moejax": 0.5,
        "share, llama.cpp": 0.5,
        "step / max(compute, disk)": 300 / 250,
        "tokens/s, moejax / llama.cpp": 3.0,
    }
    said = "\n".join(peer.report({"agreement": [], "rows": [], "bars": found, "verified": True}))
    assert "bar ≥ 0.90: MISSED" in said and "bar ≥ 1.50: met" in said
    assert "bar ≤ 1.20: met" in said and "checksums verified" in said
