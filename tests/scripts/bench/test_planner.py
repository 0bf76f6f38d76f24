"""FluxMoE's Exp#3 as a race."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.bench import planner
from tests.scripts.runs import json_lines


def test_each_planner_has_its_turn_and_its_ratio(capsys, monkeypatch):
    """A step takes as long as there are layers whose experts are at the host; the clock is ours."""
    drivers, now = [], [0.0]

    @contextlib.contextmanager
    def llm(model, *, driver, **options):
        drivers.append(dict(pair.partition("=")[::2] for pair in driver.split(",")))
        kind = drivers[-1]["planner"]
        rows = {"none": [1, 1], "live": [2, 2], "one-layer": [3, 1]}[kind]

        def generate(prompts, params, use_tqdm):
            now[0] += {"none": 4.0, "live": 2.0, "one-layer": 8.0}[kind] * len(prompts)

        moved = {"moves": [{"host": sum(rows), "by_layer": rows}] if kind != "none" else []}
        window = SimpleNamespace(placement=np.tile([0, 0, 1], (2, 1)))
        engine = SimpleNamespace(runner=SimpleNamespace(window=window))
        stats = {"planner": moved, "kv": {"preemptions": int(kind == "none")}}
        yield SimpleNamespace(generate=generate, engine=engine, stats=lambda: stats)

    monkeypatch.setattr(planner, "LLM", llm)
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rows = json_lines(capsys, planner.main, "--rounds", "2", "--requests", "2", "--tokens", "8")
    turns = [driver["planner"] for driver in drivers]
    assert turns == [*planner.ARMS, *reversed(planner.ARMS)]
    assert ["interval" in driver for driver in drivers[:3]] == [False, True, True]
    assert [row["ratio"] for row in rows] == [1.0, 2.0, 0.5]
    assert [row["rate"] for row in rows] == pytest.approx([2.0, 4.0, 1.0])
    assert [(row["moves"], row["released"], row["skew"]) for row in rows] == [
        (0, 0, 1.0),
        (1, 2, 1.0),
        (1, 2, 1.5),
    ]
    assert [row["preempted"] for row in rows] == [1, 0, 0]
