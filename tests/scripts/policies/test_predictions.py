"""The figures that check_predictions.py reports are right, and it runs."""

import json

import numpy as np
import pytest

from scripts.policies import predictions as check_predictions
from scripts.policies.predictions import errors, kendall, report


def line(mean, predicted, *, batch=1, spread=0.1, **other):
    measured, foretold = (
        dict.fromkeys(("p50", "p99", "p99_raw", "mean", "total"), seconds)
        for seconds in (mean, predicted)
    )
    return {
        **dict(device="CPU", model="m", batch=batch, prompt=8, policy="lru", cells=2, link="none"),
        **dict(misses_per_step=1.0, stall_share=0.25, stall_bound_share=0.125),
        **dict(repeats=5, compiled_steps=1),
        "measured_ms": measured,
        "predicted_ms": foretold,
        "mean_interval_ms": [mean - spread, mean + spread],
        **other,
    }


def test_tau_counts_pairs_of_one_batch():
    ordered = [line(1, 10), line(2, 20), line(3, 30)]
    assert kendall(ordered, apart=False) == (1.0, 3)
    assert kendall([line(1, 30), line(2, 20), line(3, 10)], apart=False) == (-1.0, 3)
    one_wrong = [line(1, 10), line(2, 30), line(3, 20)]
    assert kendall(one_wrong, apart=False) == (pytest.approx(1 / 3), 3)
    # Equal predictions are a pair that is not ordered.
    assert kendall([line(1, 10), line(2, 10)], apart=False) == (0.0, 1)
    apart = [line(1, 10), line(2, 20, batch=2)]
    assert np.isnan(kendall(apart, apart=False)[0])


def test_pairs_that_were_not_told_apart_are_left_out():
    lines = [line(1.0, 10), line(1.1, 5), line(2.0, 20)]
    assert kendall(lines, apart=False) == (pytest.approx(1 / 3), 3)
    assert kendall(lines, apart=True) == (1.0, 2)


def test_errors_are_relative_to_what_was_measured():
    lines = [line(2, 1), line(2, 3), line(4, 4)]
    assert errors(lines, "p50").tolist() == [-0.5, 0.5, 0]
    text = report(lines)
    assert "| CPU | m | 1 | 8 | lru | 2 | none | 1.0 | 2.00 | 1.00 |" in text
    assert "| m | 3 | 33.3% | -50.0% |" in text
    assert "3 held-out configurations, 5 interleaved repeats" in text
    assert text.splitlines()[-3].endswith("| 50.0% | -50.0% |")
    assert "3 steps that compiled were left out. Device: CPU." in text


def test_every_configuration_is_of_its_own():
    for name in ("demo", "wide"):
        found = list(check_predictions.held_out(name, 32, ("none", "2GB/s")))
        assert len(found) >= 24 and len({c.place for c in found}) == len(found)
        assert [c.queue and c.queue.rate for c in found[:2]] == [None, 2e9]


def test_too_few_repeats_are_refused(tmp_path, capsys):
    assert check_predictions.main([str(tmp_path), "--repeats", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--links", "none,fast"), "'fast' is not a rate"),
        (("--configurations", "0"), "--configurations must be at least 1"),
        (("--longest", "200"), "--longest must be at least 216, got 200"),
        (("--configurations", "1", "--longest", "39"), "--longest must be at least 40, got 39"),
    ],
)
def test_what_no_engine_could_run_is_refused(tmp_path, capsys, arguments, message):
    assert check_predictions.main([str(tmp_path), "--models", "demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_it_runs(tmp_path, monkeypatch):
    """A few configurations of the demo; simulated and measured misses are compared inside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check_predictions, "WORKLOADS", ((2, 8),))
    arguments = [str(tmp_path / "out"), "--models", "demo", "--repeats", "2", "--tokens", "4"]
    assert check_predictions.main(arguments) == 0
    lines = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(check_predictions.POLICIES)
    for text in lines:
        found = json.loads(text)
        assert found["device"] == "CPU" and found["steps"] == 3 and found["repeats"] == 2
        assert all(seconds > 0 for seconds in found["predicted_ms"].values())
