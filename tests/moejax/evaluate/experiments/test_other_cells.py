"""Cells of other kinds: predicted, between layers, in another precision; each where the engine or
the simulator has something to compare with."""

import pytest

import moejax
from moejax.costs.store import write_cost_model
from moejax.errors import UserError
from tests.moejax.engine.budget_workload import COSTS

pytestmark = pytest.mark.slow  # engines of their own; test_grid.py shows the common kind

SMALL = {"texts": ["story"], "prompt_tokens": 40, "output_tokens": 6, "repeats": 1}


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    home = tmp_path_factory.mktemp("predicted")
    write_cost_model(home / "costs.json", COSTS)
    given = SMALL | {
        "policies": ["lru", "lfu"],
        "budgets": ["37.5%", "75%"],
        "modes": ["simulated", "predicted"],
        "costs": str(home / "costs.json"),
    }
    return moejax.ablate(given, home / "out", progress=False)


def test_a_prediction_has_the_simulators_counts_and_times(predicted):
    simulated = {(r["policy"], r["budget"]): r for r in predicted.of_mode("simulated")}
    assert len(simulated) == len(predicted.of_mode("predicted")) == 4
    for row in predicted.of_mode("predicted"):
        other = simulated[row["policy"], row["budget"]]
        assert row["decode_misses"] == other["decode_misses"]
        assert row["decode_bytes"] == other["decode_bytes"]
        # 1 ms a step, and 0.2 ms for each expert that is missing.
        steps, missing = row["decode_steps"], row["decode_misses"]
        least = steps * 1e-3 + missing * 2e-4
        assert least < row["decode_s"] < 2 * least + 0.01
    times = {r["budget"]: r["decode_s"] for r in predicted.of_mode("predicted")}
    assert times["75%"] < times["37.5%"]
    assert predicted.of_mode("measured") == []


def test_costs_that_are_not_there_are_refused():
    with pytest.raises(
        UserError, match=r"there is no file .*none\.json; moejax calibrate makes one"
    ):
        moejax.ablate(
            SMALL | {"policies": ["lru"], "budgets": ["50%"], "costs": "none.json"}, "nowhere"
        )


def test_costs_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "costs.json").write_text("{}")
    given = {"policies": ["lru"], "budgets": ["50%"], "modes": ["predicted"]}
    given |= SMALL | {"costs": str(tmp_path / "costs.json")}
    with pytest.raises(UserError, match="modes: predicted"):
        moejax.ablate(given, tmp_path / "out", progress=False)


def test_policies_between_layers_count_what_the_simulator_counts(tmp_path):
    """With the host driver, and with what the routers see given out."""
    given = SMALL | {
        "policies": ["lru", "layer-streaming", "fate"],
        "budgets": ["50%"],
        "modes": ["measured", "simulated"],
    }
    found = moejax.ablate(given, tmp_path / "out", progress=False)
    assert not found.failures
    assert found.agreement() == (4, 4)  # the baseline with both drivers
    assert len(found.sessions) == 3
    ahead = {r["policy"]: r["decode_ahead"] for r in found.of_mode("measured")}
    assert ahead["layer-streaming"] > 0
    assert ahead["fate"] > 0
    lines = [line for line in found.summary() if line["policy"] == "fate"]
    # Times are compared within a driver and a session; the engine with arrays has another one.
    assert all("tpot_p50_s_ratio" not in line for line in lines)
