"""The table's arithmetic, and the refusal of engines that compute something else."""

import re

import numpy as np
import pytest

from scripts.cpu.engines import compare
from scripts.cpu.engines.compare import (
    Blocks,
    Plan,
    add_bytes,
    agreement,
    case_rows,
    measure,
    table,
)
from scripts.cpu.engines.protocol import Task


class Fake:
    """A worker with given scores, seconds of a step and bytes."""

    def __init__(self, scores, seconds=(0.1,), read=None):
        self.task = Task("model", 7, batch=2, steps=len(scores))
        self.scores, self.seconds, self.read, self.asked = scores, seconds, read, []

    def ask(self, what, **fields):
        self.asked.append(what)
        batch = fields.get("batch", 1)
        if what == "check":
            return {"scores": [row[:batch] for row in self.scores]}
        if what == "bytes":
            return {"bytes": self.read and dict(self.read)}
        return {"seconds": list(self.seconds), "processor": 2 * sum(self.seconds)}


def test_engines_that_compute_something_else_are_refused():
    ours, theirs = Fake([[-1.0, -2.0]] * 4), Fake([[-1.1, -2.1]] * 4)
    (line,) = agreement({"moejax": ours, "llama.cpp BF16": theirs}, 0.2)
    assert "8 forced tokens" in line and "median difference 0.1000" in line
    with pytest.raises(RuntimeError, match="do not compute the same"):
        agreement({"moejax": ours, "llama.cpp BF16": theirs}, 0.05)
    with pytest.raises(RuntimeError, match="do not compute the same"):
        agreement({"moejax": ours, "llama.cpp BF16": Fake([[np.nan, np.nan]] * 4)}, 0.05)
    # Of transformers the first sequence alone has the same context.
    (line,) = agreement({"moejax": ours, "transformers bf16": Fake([[-1.0, 5.0]] * 4)}, 0.05)
    assert "4 forced tokens" in line


def test_ratios_are_of_neighbours_and_bars_of_their_median():
    ours = Blocks([0.1, 0.2, 0.1, 0.2, 0.1, 0.2], [0.2] * 6)
    llama = Blocks([0.11, 0.22, 0.11, 0.22, 0.11, 0.22], [0.1] * 6)
    slow = Blocks([30.0], [60.0])
    found = {"moejax": ours, "llama.cpp BF16": llama, "transformers bf16": slow}
    first, second, third = case_rows("decode 8", 8, found)
    assert first["tokens_per_s"] == pytest.approx(8 / 0.15) and "ratio" not in first
    assert second["ratio"] == pytest.approx(1.1) and second["met"]
    assert second["interval"] == pytest.approx([1.1, 1.1])
    assert second["processor_ratio"] == pytest.approx(0.5)
    assert third["ratio"] == pytest.approx(200) and third["interval"] is None
    llama.seconds = [0.09, 0.18] * 3
    missed = case_rows("decode 8", 8, found)[1]
    assert not missed["met"]
    text = "\n".join(table([first, missed, third]))
    assert "≥ 1.0: **missed**" in text and "≥ 2.0: met" in text and "200.00 (1 rounds)" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1


def test_bytes_of_another_engine_are_its_files():
    ours = Fake([], read={"experts": 4.0, "head": 1.0, "KV": 2.0, "share": 0.5})
    theirs = Fake([], read={"experts": 6e9, "embeddings": 5e9, "others": 1e9})
    rows = [{}, {}, {}]
    workers = {"moejax": ours, "llama.cpp Q8_0 all": theirs, "transformers bf16": Fake([])}
    add_bytes(rows, workers, 8)
    assert [row["gb"] for row in rows] == pytest.approx([7e-9, 4 + 2e-9, 7e-9])


def test_a_slow_block_is_not_repeated(monkeypatch):
    monkeypatch.setattr(compare, "PAUSE", 0)
    read = {"experts": 1.0, "share": 0.5, "KV": 0.0}
    fast, slow = Fake([], [0.1, 0.1], read), Fake([], [7.0])
    plan = Plan(rounds=6, block_s=0.2, limit_s=5.0, prompt=512)
    said: list[str] = []
    rows = measure(plan, {"moejax": fast, "transformers bf16": slow}, said.append)
    assert [re.match(r"[a-z]+ ?\d?", line)[0].strip(": ") for line in said] == [
        "decode 1",
        "decode 8",
        "prefill",
    ]
    assert fast.asked.count("prefill") == 7 and slow.asked.count("prefill") == 1
    assert [row["rounds"] for row in rows] == [6, 1] * 3
    assert rows[-1]["ratio"] == pytest.approx(70)
    assert rows[2]["tokens_per_s"] == pytest.approx(80)
