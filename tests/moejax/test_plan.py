"""moejax plan: splits, memories and users from a trace and costs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform

import numpy as np
import pytest

from host_offload.configurator import bursts_of, replay_split
from host_offload.simulator import simulate
from host_offload.traces import read_trace
from moejax import LLM, UserError
from moejax.cli import main
from moejax.plan import Planner, costs_of_trace, parse_time, read_options
from tests.moejax.budget_workload import COSTS, LIMITS, MEMORY, PER_SLOT, SLOT, recorded


@pytest.fixture(scope="module")
def trace():
    return read_trace(recorded()[0])


@pytest.fixture(scope="module")
def planner(trace):
    return Planner(trace, COSTS)


@pytest.fixture
def costs(tmp_path):
    """Costs in a file."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.to_json()))
    return str(path)


@pytest.mark.parametrize("cells", ["uniform", "optimal"])
def test_a_split_fits_and_its_predictions_are_the_simulators(planner, trace, cells):
    plan = planner.split(MEMORY, cells=cells)
    assert plan.expert_bytes + plan.kv_bytes <= plan.memory == MEMORY
    assert plan.expert_bytes == sum(plan.cells) * SLOT
    assert plan.kv_bytes * PER_SLOT == plan.kv_pages * SLOT and plan.kv_tokens == plan.kv_pages * 16
    missed = simulate(trace, cells=plan.cells).misses.sum()
    first = replay_split(bursts_of(trace), [np.array(plan.cells)] * 15, [10**6] * 15).expert_first
    # A cell count above every step's set: the curve is the pager's own.
    if min(plan.cells) >= 16:
        assert plan.expert_misses == missed - first
    assert plan.expert_misses == pytest.approx(missed - first, rel=0.3)
    assert plan.step_s and plan.step_s > 1e-3 and plan.tokens_per_s


def test_the_trace_says_what_cells_there_were_and_who_chose_them(trace):
    """Without cells= a simulation has those of the run."""
    spec = trace.header.spec
    assert spec["cells"] == [7, 7, 7, 7] and spec["budgets"]["cells"] == "uniform"
    run = sum(int(s.fills.sum() + s.read_through.sum()) for s in trace.step_traces())
    assert simulate(trace).misses.sum() == run


def test_more_memory_is_never_predicted_to_miss_more(planner):
    plans = [planner.split(memory << 20) for memory in (2, 3, 4, 6)]
    lost = [p.miss_s for p in plans]
    assert lost == sorted(lost, reverse=True) and lost[0] > lost[-1]


def test_users_and_memory_are_two_ways_of_the_same_question(planner):
    capacity = planner.memory_for(4, 3e-3)
    assert capacity.users == 4 and capacity.step_s <= 3e-3
    assert capacity.kv_pages >= 4 * capacity.pages_per_user
    back = planner.users_for(capacity.memory, 3e-3)
    assert back.users >= 4
    less = dataclasses.replace(capacity, memory=capacity.memory - 4 * SLOT)
    with contextlib.suppress(UserError):  # none at all
        assert planner.users_for(less.memory, 3e-3).users <= back.users


def test_refusals(planner, trace):
    with pytest.raises(UserError, match="leaves KV 96 tokens, fewer than its floor of 256"):
        planner.split(100 << 10)
    with pytest.raises(UserError, match=r"4 users cannot get a token every 0\.001 ms"):
        planner.memory_for(4, 1e-6)
    with pytest.raises(UserError, match="users must be at least 1"):
        planner.memory_for(0, 1.0)
    with pytest.raises(UserError, match=r"steps of 99 sequences cannot be predicted: the trace"):
        planner.memory_for(99, 1.0)
    with pytest.raises(UserError, match="times of steps need measured costs"):
        Planner(trace, None, link=1e9).users_for(MEMORY, 1.0)
    with pytest.raises(UserError, match="does not say what computing KV again costs"):
        Planner(trace, None, link=1e9).split(MEMORY, kv_overflow="recompute")
    free = dataclasses.replace(COSTS, fill=COSTS.fill * [1, 0])
    with pytest.raises(UserError, match="a missing expert costs nothing"):
        Planner(trace, free).split(MEMORY)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("0.5 s", 0.5), ("20us", 2e-5), (".5ms", 5e-4)]
)
def test_times(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["50", "ms", "0ms", "-5ms", "5 minutes", "1e-3s", ""])
def test_what_is_no_time(text):
    with pytest.raises(UserError, match="is not a time"):
        parse_time(text)


# ---- the command


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    return status, *capsys.readouterr()


def test_a_plan_runs(trace, costs, capsys, tmp_path):
    """The file that --output writes is a run's split, and its tokens are any other's."""
    output = str(tmp_path / "plan.json")
    where = ("--trace", str(trace.directory), "--costs", costs)
    options = ("--memory", "3MiB", "--cells", "marginal", "--output", output)
    status, out, _ = run(capsys, *where, *options)
    assert status == 0 and f"run with --config {output}" in out
    assert "time per token (a decode step)" in out and "KV pages that come back" in out
    with LLM("demo", progress=False, **LIMITS, **read_options(output)) as llm:
        arena = llm.stats()["arena"]
    assert arena["bytes"] <= MEMORY
    status, out, _ = run(capsys, *where, "--memory", "3MiB", "--cells", "marginal", "--json")
    plan = json.loads(out)
    assert plan["cells"] == arena["cells_per_layer"] and plan["kv_pages"] == arena["kv_pages"]


def test_users_for_a_memory_and_back(trace, costs, capsys):
    where = ("--trace", str(trace.directory), "--costs", costs)
    status, out, _ = run(capsys, *where, "--users", "4", "--tpot", "3ms", "--json")
    assert status == 0
    memory = str(json.loads(out)["memory"])
    status, out, _ = run(capsys, *where, "--memory", memory, "--tpot", "3ms")
    assert status == 0 and re_number("users at once", out) >= 4


def re_number(name: str, text: str) -> int:
    (line,) = [line for line in text.splitlines() if name in line]
    return int(line.split()[-1])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "give --memory for a split"),
        (("--users", "3"), "give --memory for a split"),
        (("--memory", "1GiB", "--users", "3", "--tpot", "1s"), "give --memory for a split"),
        (("--users", "3", "--tpot", "1s", "--output", "x"), "--output writes a split"),
        (("--memory", "3 furlongs"), "is not a size"),
        (("--memory", "3MiB", "--tpot", "soon"), "is not a time"),
        (("--memory", "3MiB", "--link", "fast"), "is not a rate"),
    ],
)
def test_commands_that_mean_nothing(trace, capsys, arguments, match):
    status, out, err = run(capsys, "--trace", str(trace.directory), *arguments)
    assert status == 2 and out == "" and match in err


def test_a_directory_that_is_no_trace(capsys, tmp_path):
    status, _, err = run(capsys, "--trace", str(tmp_path), "--memory", "3MiB")
    assert status == 2 and str(tmp_path) in err


def test_costs_are_those_of_the_traces_model_on_this_machine(trace, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no costs of the trace's model were measured on this"):
        costs_of_trace(trace)
    directory = tmp_path / "moejax" / "costs"
    directory.mkdir(parents=True)
    about = {"model": trace.header.config_digest, "machine": platform.node()}

    def put(name: str, created: str, **changes) -> None:
        model = dataclasses.replace(COSTS, about={**about, "created": created, **changes})
        (directory / name).write_text(json.dumps(model.to_json()))

    put("other.json", "2031", model="another")
    put("a.json", "2030", here="new")
    put("b.json", "2029", here="old")
    (directory / "damaged.json").write_text("{")
    assert costs_of_trace(trace).about["here"] == "new"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object of options, not list"),
        ('{"max_tokens": 3}', "unknown option 'max_tokens'; known: memory"),
    ],
)
def test_files_of_options_that_mean_nothing(text, match, tmp_path):
    path = tmp_path / "options.json"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        read_options(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_options(tmp_path / "none.json")
