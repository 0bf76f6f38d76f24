"""Predictions are compared with runs of the same minutes."""

from __future__ import annotations

import pytest

from moejax.costs import measure
from scripts.check import predictions


def test_a_machine_that_becomes_slower_is_compared_with_itself():
    found = predictions.errors([1.1, 1.3, 1.5], [1.0, 1.2, 1.4, 1.6])
    assert found["error"] == pytest.approx(0) and found["measured"] == pytest.approx(1300)
    found = predictions.errors([1.0, 1.0, 1.0], [1.0, 1.2, 1.2, 1.6])
    assert [found[name] for name in ("least", "error", "most")] == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.slow
def test_the_check_compares_every_place(monkeypatch, demo_dir, capsys):
    monkeypatch.setattr(predictions, "PROMPTS", {2: 2})
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(predictions, "MOST", 100.0)
    monkeypatch.setattr(measure, "MORE_STEPS", 4)
    assert predictions.main(["--models", str(demo_dir), "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 within 10000%" in shown
    assert len([line for line in shown.splitlines() if " lfu " in line or " lru " in line]) == 6
