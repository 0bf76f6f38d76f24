"""Cells of other kinds: predicted, between layers, in another precision; each where the engine or
the simulator has something to compare with."""

import dataclasses
import shutil

import numpy as np
import pytest

import moejax
from host_offload.policies.prefetch import expertflow
from moejax.costs import store, workload_plan
from moejax.costs.store import cost_file, write_cost_model
from moejax.errors import UserError
from moejax.evaluate.experiments import bench, grid
from moejax.evaluate.experiments.report.tables import tables_of
from moejax.traces.conversion import convert_trace
from tests.moejax.engine.budget_workload import COSTS

FORESTS = "expertflow=train,trees=2,leaves=8,reach=1,pool=false"
LEARNED = ["static=train", "coactivation=train", "promoe=train", FORESTS, "oracle=run"]
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
    # The engine with arrays has another session than the baseline's.
    assert all(line["ratio_apart"] for line in lines)


def test_half_experts_are_an_arm(tmp_path):
    """Whole experts in MoEpic's cache miss what LRU misses, after the same prefill; tops of half
    are hit more often."""
    write_cost_model(tmp_path / "costs.json", COSTS)
    tops = ["moepic=train,top=1.0,ahead=false", "moepic=train,top=0.5,ahead=false", "moepic=train"]
    given = SMALL | {"policies": ["lru", *tops], "budgets": ["37.5%"], "output_tokens": 12}
    given |= {"modes": ["predicted"], "costs": str(tmp_path / "costs.json"), "prompt_tokens": 8}
    given |= {"link_rate": ["20MB/s"], "train_prompts": 2}
    found = moejax.ablate(given, tmp_path / "out", progress=False)
    assert not found.failures
    rows = {row["policy"]: row for row in found.of_mode("predicted")}
    whole, half, chosen = (rows[name] for name in tops)
    assert (
        whole["decode_hits"] + whole["decode_misses"] == half["decode_hits"] + half["decode_misses"]
    )
    assert half["decode_hits"] > whole["decode_hits"] == rows["lru"]["decode_hits"] > 0
    assert whole["decode_bytes"] == whole["decode_misses"] * 98304 and whole["top_share"] == 1
    assert 0.25 <= chosen["top_share"] <= 1 and chosen["decode_bytes"] > 0
    assert all(row["tpot_p50_s"] > 1e-3 for row in rows.values())  # a step alone takes 1 ms
    assert "moepic" in next(tables_of(found)).rows[1][0]


def test_placements_are_arms(tmp_path):
    """What the second processor computes changes no token, but for deferred experts, which the
    report says; the simulator moves what the engine moves."""
    costs = "per_token=20us,startup=50us,load=200us,accelerator=20us,attention=100us"
    placed = {name: f"placement={name},{costs}" for name in ("dali", "ktransformers")}
    ahead = f"placement=prescope,predict=gates,{costs}"
    late = f"placement=ktransformers,defer=4,{costs}"
    given = SMALL | {"budgets": ["37.5%"], "output_tokens": 12, "driver": "host"}
    plain = {"policies": ["lru", *placed.values()], "modes": ["measured", "simulated"]}
    found = moejax.ablate(given | plain, tmp_path / "out", progress=False)
    assert not found.failures and found.agreement() == (3, 3)
    rows = {row["policy"]: row for row in found.of_mode("measured")}
    assert len({row["tokens"] for row in rows.values()}) == 1
    misses = {name: rows[policy]["decode_misses"] for name, policy in placed.items()}
    assert misses["ktransformers"] < misses["dali"] < rows["lru"]["decode_misses"]
    # PreScope's costs follow the clock, so its counts are an engine's alone.
    deferred = given | {"policies": ["lru", ahead, late], "repeats": 2}
    other = moejax.ablate(deferred, tmp_path / "late", progress=False)
    notes = [*other.notes()]
    assert not other.failures and f"{late} CHANGES OUTPUTS" in " ".join(notes)
    assert not any("must not be" in note for note in notes)
    tokens = {row["policy"]: row["tokens"] for row in other.of_mode("measured")}
    assert tokens[late] != tokens["lru"] == tokens[ahead] == rows["lru"]["tokens"]


def test_stand_ins_are_an_arm(tmp_path):
    """Residents that stand in save misses and change outputs, which the report says, with
    perplexity by budget beside; the baseline's routing is recorded by its own engine."""
    buddies = "lru + buddies=train,spread=0.0,cover=1.0"
    given = SMALL | {"policies": ["lru", buddies], "budgets": ["25%", "75%"], "output_tokens": 12}
    given |= {"train_prompts": 2, "quality_tokens": 96}
    found = moejax.ablate(given, tmp_path / "out", progress=False)
    assert not found.failures and len(found.of_mode("bound")) == 2
    for budget in given["budgets"]:
        rows = {r["policy"]: r for r in found.of_mode("measured") if r["budget"] == budget}
        assert rows[buddies]["tokens"] != rows["lru"]["tokens"]
        assert rows[buddies]["decode_misses"] < rows["lru"]["decode_misses"]
    notes = " ".join(found.notes())
    assert f"{buddies} CHANGES OUTPUTS: residents stand in" in notes
    assert "must not be" not in notes and "less than MIN" not in notes
    *_, quality = [table for table in tables_of(found) if table.title == "Quality"]
    columns = dict(zip(quality.headings, zip(*quality.rows, strict=True), strict=True))
    assert columns["policy"] == ("–", buddies, buddies) and columns["budget"][1:] == ("25%", "75%")
    assert len({*columns["perplexity"]}) == 3 and columns["above dense"][1].startswith(("+", "-"))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Four prompts, two at a time, with policies that learn from three others."""
    given = SMALL | {
        "policies": ["lru", *LEARNED],
        "budgets": ["37.5%"],
        "batch": 2,
        "prompts": 4,
        "train_prompts": 3,
        "modes": ["measured", "simulated"],
    }
    home = tmp_path_factory.mktemp("learned")
    return moejax.ablate(given, home / "out", progress=False)


@pytest.mark.nightly
def test_what_learned_within_a_grid_counts_what_the_simulator_counts(learned):
    assert not learned.failures
    assert learned.agreement() == (7, 7)  # the baseline with both drivers
    traces = learned.directory / "traces"
    trained = [path.name for path in traces.glob("train*") if path.is_dir()]
    assert trained == ["train-gate_input"]  # one trace for all of them
    paid = {r["policy"]: r["learned_bytes"] for r in learned.of_mode("simulated")}
    assert paid["promoe=train"] > 0 and paid[FORESTS] > 0
    assert paid["oracle=run"] == paid["lru"] == 0
    ahead = {r["policy"]: r["ahead_used"] for r in learned.of_mode("simulated")}
    assert all(ahead[name] > 0 for name in LEARNED)
    assert not any("less than MIN" in note for note in learned.notes())


def test_prompts_run_batch_by_batch(learned):
    """Four prompts of six tokens: each of them decodes five times, two together."""
    steps = {(r["prefill_steps"], r["decode_steps"]) for r in learned.of_mode("measured")}
    assert steps == {(2, 10)}


def test_what_was_learned_is_found_again(learned, monkeypatch):
    """A grid that goes on does not start an engine to learn, nor grow forests again."""
    monkeypatch.setattr(grid, "engine_bench", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr(expertflow, "fit", lambda *_, **__: pytest.fail("it learned"))
    given = {
        name: value for name, value in learned.asked.items() if name not in ("files", "defaults")
    }
    again = moejax.ablate(given, learned.directory, progress=False)
    assert again.rows == learned.rows


DRAWN = {
    "policies": ["lru", "lfu", "coactivation=train", "oracle=run"],
    "budgets": ["25%", "75%"],
    "routing": ["qwen3-like,layers=2,shared=0.5", "uniform,layers=2,experts=16,top_k=2"],
    "prompt_tokens": 12,
    "output_tokens": 12,
    "batch": [1, 2],
    "modes": ["simulated"],
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return moejax.ablate(DRAWN, tmp_path_factory.mktemp("drawn") / "out", progress=False)


def test_drawn_routing_teaches_who_looks_between_layers(drawn):
    assert not drawn.failures
    drivers = {(row["policy"], row["driver"]) for row in drawn.of_mode("simulated")}
    assert drivers >= {("coactivation=train", "host"), ("lru", "device"), ("lru", "host")}
    ahead = [r["ahead_used"] for r in drawn.of_mode("simulated") if "train" in r["policy"]]
    assert sum(ahead) > 0


def test_less_than_the_bound_is_a_bug(drawn):
    rows = [dict(row) for row in drawn.rows]
    bound = next(row for row in rows if row["mode"] == "bound" and row["decode_misses"])
    bound["decode_misses"] = bound["pool_misses"] = 10**6
    notes = [*dataclasses.replace(drawn, rows=rows).notes()]
    assert "lfu moved less than MIN, which cannot be: report a bug" in notes
    assert not any("less than MIN" in note for note in drawn.notes())


def test_a_trace_is_routing_too(drawn, tmp_path):
    (path, *_) = [p for p in (drawn.directory / "traces").iterdir() if "uniform" in p.name]
    given = {"policies": ["lru", "lfu"], "budgets": ["50%"], "modes": ["simulated"]}
    found = moejax.ablate(given | {"routing": [str(path)]}, tmp_path / "out", progress=False)
    assert not found.failures
    taught = given | {"routing": [str(path)], "policies": ["lru", "static=train"]}
    with pytest.raises(UserError, match="one trace, which policies are compared on"):
        moejax.ablate(taught, tmp_path / "other", progress=False)


def test_a_converted_trace_is_routing_with_stated_costs(tmp_path):
    ids = np.argsort(np.random.default_rng(0).random((40, 3, 8)), axis=-1)[..., :2]
    np.save(tmp_path / "a.npy", ids)
    convert_trace(tmp_path / "a.npy", tmp_path / "t", experts=8, prompt_tokens=8)
    given = {
        "policies": ["lru", "layer-streaming"],
        "budgets": ["50%"],
        "routing": [f"{tmp_path / 't'},expert_bytes=1000000"],
        "modes": ["predicted"],
        "costs": "rtx3060",
        "link_rate": ["none", "1GB/s"],
    }
    found = moejax.ablate(given, tmp_path / "out", progress=False)
    assert not found.failures
    rows = {(r["policy"], r["link_rate"]): r for r in found.of_mode("predicted")}
    lru = rows["lru", "none"]
    assert lru["decode_bytes"] == lru["decode_misses"] * 1_000_000
    assert lru["tpot_p50_s"] < rows["lru", "1GB/s"]["tpot_p50_s"]
    with pytest.raises(UserError, match="expert_bytes"):
        moejax.ablate(
            given | {"routing": [f"{tmp_path / 't'},expert_bytes=0"]},
            tmp_path / "b",
            progress=False,
        )
    convert_trace(tmp_path / "a.npy", tmp_path / "u", experts=8)
    with pytest.raises(UserError, match="convert it again with --prompt-tokens N"):
        moejax.ablate(given | {"routing": [str(tmp_path / "u")]}, tmp_path / "b", progress=False)
    assert not (tmp_path / "b").exists()


def test_drawn_routing_is_predicted_over_a_link(tmp_path):
    """Transfers overlap computing, so who knows the run waits least of all."""
    given = {
        "policies": ["lru", "layer-streaming", "oracle=run", "clairvoyant=run"],
        "budgets": ["50%"],
        "routing": ["qwen3-like,layers=4,experts=16,top_k=2,expert_bytes=1000000"],
        "prompt_tokens": 8,
        "output_tokens": 24,
        "modes": ["predicted"],
        "costs": "rtx3060",
        "link_rate": ["none", "1GB/s"],
    }
    found = moejax.ablate(given, tmp_path / "out", progress=False)
    assert not found.failures
    rows = {(r["policy"], r["driver"], r["link_rate"]): r for r in found.of_mode("predicted")}
    linked = {place[:2]: row["tpot_p50_s"] for place, row in rows.items() if "1GB/s" in place}
    best = linked.pop(("clairvoyant=run", "host"))
    assert len(linked) == 4 and best < 0.9 * min(linked.values())
    assert linked["lru", "host"] > rows["lru", "host", "none"]["tpot_p50_s"]
    assert rows["clairvoyant=run", "host", "1GB/s"]["decode_misses"] == 0


def test_a_finished_grid_grows(drawn, tmp_path):
    out = shutil.copytree(drawn.directory, tmp_path / "out")
    more = DRAWN | {"policies": [*DRAWN["policies"], "fifo"], "budgets": ["25%", "50%", "75%"]}
    grown = moejax.ablate(more, out, progress=False)
    assert grown.rows[: len(drawn.rows)] == drawn.rows
    assert len(grown.rows) > len(drawn.rows)
    assert {row["budget"] for row in grown.rows} == {"25%", "50%", "75%"}
    with pytest.raises(UserError, match="results of another experiment: budgets"):
        moejax.ablate(DRAWN, out, progress=False)


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Over a link of stated rate and without one."""
    home = tmp_path_factory.mktemp("linked")
    write_cost_model(home / "costs.json", COSTS)
    given = SMALL | {
        "policies": ["lru", "random"],
        "budgets": ["37.5%"],
        "link_rate": ["none", "20MB/s"],
        "modes": ["measured", "simulated", "predicted"],
        "costs": str(home / "costs.json"),
    }
    return moejax.ablate(given, home / "out", progress=False)


def test_a_link_delays_and_changes_no_count(linked):
    assert not linked.failures
    assert linked.agreement() == (4, 4)
    assert len(linked.sessions) == 2
    assert len({row["tokens"] for row in linked.of_mode("measured")}) == 1
    for policy in ("lru", "random"):
        # A decode step at least as long as what it moved takes the link.
        (row,) = [
            r
            for r in linked.of_mode("measured")
            if (r["policy"], r["link_rate"]) == (policy, "20MB/s")
        ]
        assert row["decode_s"] > 0.8 * row["decode_bytes"] / 20e6
        times = {
            r["link_rate"]: r["decode_s"]
            for r in linked.of_mode("predicted")
            if r["policy"] == policy
        }
        assert times["20MB/s"] > times["none"]


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
    given = SMALL | {"policies": ["lru"], "budgets": ["50%"], "costs": "measure"}
    given |= {"modes": ["measured", "predicted"], "link_rate": ["none", "1GB/s"]}
    found = moejax.ablate(given, tmp_path / "one", progress=False)
    assert not found.failures
    ((queue, _, slots),) = measured
    assert queue is None and slots >= 4 * 16  # room for all experts
    assert found.agreement() == (2, 2)
    (table,) = [t for t in tables_of(found) if t.title.startswith("Predicted")]
    assert [row[:3] for row in table.rows] == [
        ("none", "1", "1"),
        ("1GB/s", "1", "1"),
    ]
    moejax.ablate(given, tmp_path / "two", progress=False)
    assert len(measured) == 1
