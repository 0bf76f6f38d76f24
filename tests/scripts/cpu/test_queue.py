"""python -m scripts.cpu queue, with little of everything."""

import json

import pytest

from scripts.cpu import queue
from tests.pallas_kernels.contract import NATIVE


@NATIVE
@pytest.mark.slow
def test_figures_of_memory_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(queue, "EXPERT", 3 << 20)
    monkeypatch.setattr(queue, "ROWS", 256)
    trace = tmp_path / "trace.json"
    arguments = [str(tmp_path), "--trace", str(trace), "--rounds", "1", "--size", "48MiB", "--json"]
    assert queue.main([*arguments, "--link-rate", "1e8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory: GB/s"] > 0 and found["file: GB/s"] > 0
    waits = [
        found[f"a demand {what}"]
        for what in (
            "behind prefetches: begins after, chunks",
            "of a chunk behind prefetches, chunks",
        )
    ]
    assert waits[0] < waits[1] >= 1 and found["chunks of others that begin before it, most"] <= 1
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len({span["tid"] for span in spans}) == 2 and all(span["dur"] >= 0 for span in spans)
    assert (tmp_path / f"queue-{48 << 20}.bin").stat().st_size == 48 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds and --threads must be at least 1"),
        (["--link-rate", "0"], "--link-rate positive"),
    ],
)
def test_refuses_what_makes_no_sense(arguments, message, capsys):
    assert queue.main(arguments) == 2
    assert message in capsys.readouterr().err
