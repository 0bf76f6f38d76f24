"""What a report says of predicted cells beside measured ones, and costs that a grid measures."""

import dataclasses

import numpy as np
import pytest

import moejax
from moejax.costs import store, workload_plan
from moejax.costs.store import cost_file, write_cost_model
from moejax.errors import UserError
from moejax.evaluate.experiments import bench
from moejax.evaluate.experiments.report.predictions import (
    PREDICTED_HEADINGS,
    Pair,
    errors,
    kendall,
    prediction_rows,
)
from moejax.evaluate.experiments.report.tables import other_tables
from tests.moejax.engine.budget_workload import COSTS

PLACE = dict(
    driver="device", precision="dense", link_rate="none", batch=1, prompt_tokens=8, text="story"
)


def pair(measured, predicted, *, budget="25%", spread=0.1, **place):
    """A cell with these milliseconds a step, ten steps after a first token of as many."""

    def line(mode, ms):
        seconds = {"prefill_s": ms / 1e3, "decode_s": ms / 1e2, "decode_steps": 10, "runs": 6}
        times = dict.fromkeys(("tpot_p50_s", "tpot_p99_s", "ttft_s"), ms / 1e3)
        where = {**PLACE, "mode": mode, "policy": "lru", "budget": budget, "seed": 0, **place}
        return where | seconds | times

    low, high = ((measured + sign * spread) / 1e2 for sign in (-1, 1))
    stall = {"stall_share": 0.25, "stall_bound_share": 0.125}
    interval = {"decode_s_low": low, "decode_s_high": high}
    return Pair(line("measured", measured) | interval, line("predicted", predicted) | stall)


def test_tau_counts_pairs_of_one_batch():
    ordered = [pair(1, 10), pair(2, 20), pair(3, 30)]
    assert kendall(ordered, apart=False) == (1.0, 3)
    assert kendall([pair(1, 30), pair(2, 20), pair(3, 10)], apart=False) == (-1.0, 3)
    one_wrong = [pair(1, 10), pair(2, 30), pair(3, 20)]
    assert kendall(one_wrong, apart=False) == (pytest.approx(1 / 3), 3)
    # Equal predictions are a pair that is not ordered.
    assert kendall([pair(1, 10), pair(2, 10)], apart=False) == (0.0, 1)
    assert np.isnan(kendall([pair(1, 10), pair(2, 20, batch=2)], apart=False)[0])


def test_errors_are_relative_to_what_was_measured():
    pairs = [pair(2, 1), pair(2, 2.5, budget="50%"), pair(4, 4, batch=8)]
    assert errors(pairs, "p50") == pytest.approx([-0.5, 0.25, 0])
    rows = prediction_rows([line for found in pairs for line in found])
    assert [row[:3] for row in rows] == [
        ["none", "1", "2"],
        ["none", "8", "1"],
        ["all", "all", "3"],
    ]
    said = dict(zip(PREDICTED_HEADINGS, rows[-1], strict=True))
    assert said["step, median"] == "25.0%"
    assert said["p99"] == said["first token"] == said["run"] == "25.0% (-50.0%)"
    assert (said["τ"], said["τ, told apart"]) == ("0.00 of 1", "–")
    assert (said["stall"], said["bound"]) == ("25%", "12%")


GIVEN = {
    "policies": ["lru"],
    "budgets": ["50%"],
    "prompt_tokens": 8,
    "output_tokens": 4,
    "modes": ["measured", "predicted"],
    "repeats": 1,
    "costs": "measure",
}


@pytest.mark.slow
def test_costs_are_measured_once_and_without_a_link(tmp_path, monkeypatch):
    """For an engine with a link too; calibrate itself is of tests/moejax/costs."""
    for module in (store, workload_plan):  # programs are kept where they always are
        monkeypatch.setattr(module, "cache_root", lambda: tmp_path / "cache")
    measured = []

    def calibrated(runner):
        about = bench.identity(runner.steps)
        measured.append((runner.steps.queue, runner.shapes.rows, runner.slots))
        write_cost_model(cost_file(about), dataclasses.replace(COSTS, about=about))

    monkeypatch.setattr(bench, "calibrate", calibrated)
    given = GIVEN | {"link_rate": ["none", "1GB/s"]}
    found = moejax.ablate(given, tmp_path / "one", progress=False)
    assert not found.failures
    ((queue, _, slots),) = measured
    assert queue is None and slots >= 4 * 16  # room for all experts
    assert found.agreement() == (2, 2)
    (table,) = [t for t in other_tables(found) if t.title.startswith("Predicted")]
    assert [row[:3] for row in table.rows] == [
        ["none", "1", "1"],
        ["1GB/s", "1", "1"],
        ["all", "all", "2"],
    ]
    moejax.ablate(given, tmp_path / "two", progress=False)
    assert len(measured) == 1


def test_routing_without_a_model_has_nothing_to_measure():
    given = {"policies": "lru", "budgets": "50%", "routing": "uniform", "costs": "measure"}
    with pytest.raises(UserError, match="without a model, whose costs could be measured"):
        moejax.ablate(given | {"modes": ["predicted"]}, "nowhere")
