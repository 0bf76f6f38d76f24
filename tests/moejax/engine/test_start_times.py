"""Phases of a start: none is counted twice."""

import pytest

from moejax.engine import statistics
from moejax.engine.statistics import StartTimes


def test_phases_add_up(monkeypatch):
    clock = iter([10.0, 11.0, 15.0, 18.0, 18.5])
    monkeypatch.setattr(statistics.time, "perf_counter", lambda: next(clock))
    times = StartTimes()
    times.end("backend")
    times.end("load", {"read": 3.0})
    times.end("engine")
    times.end("tokenizer")
    phases = {"backend": 1.0, "read": 3.0, "load": 1.0, "engine": 3.0, "tokenizer": 0.5}
    assert times.report() == {"load_s": 5.0, "start_s": 8.5, "start": phases}
    assert times.total_s == pytest.approx(sum(phases.values()))
    assert str(times).startswith("backend 1.00 s, read 3.00 s, ")
