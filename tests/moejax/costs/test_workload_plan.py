"""moejax plan: splits from a trace and costs."""

from __future__ import annotations

import dataclasses
import json
import platform
import re

import pytest

from host_offload.simulate.prediction import predict
from host_offload.simulate.simulator import simulate
from host_offload.simulate.timeline import Link
from host_offload.sizing.configurator import turns_of
from host_offload.sizing.miss_curves import trace_curves
from host_offload.traces.reader import read_trace
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.commands.model import read_options
from moejax.costs.workload_plan import Planner, costs_of_trace
from tests.host_offload.sizing.test_split import pool
from tests.host_offload.traces.traces_of import rewritten
from tests.moejax.engine.budget_workload import (
    COSTS,
    LIMITS,
    MEMORY,
    PER_SLOT,
    SLOT,
    recorded,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


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


@pytest.mark.parametrize("cells", ["uniform", "marginal"])
def test_a_split_fits_and_its_predictions_are_the_simulators(planner, trace, cells):
    """Experts' misses bound what LRU does from below where a set does not fit, within a third here;
    KV's are those of an exact replay."""
    plan = planner.split(MEMORY, cells=cells)
    assert plan.expert_bytes + plan.kv_bytes <= plan.memory == MEMORY
    assert plan.expert_bytes == sum(plan.cells) * SLOT
    assert plan.kv_bytes * PER_SLOT == plan.kv_pages * SLOT and plan.kv_tokens == plan.kv_pages * 16
    missed = simulate(trace, cells=plan.cells).misses.sum()
    first = trace_curves(trace).first.sum()
    assert plan.expert_misses == pytest.approx(missed - first, rel=0.3)
    assert plan.link_bytes == missed * SLOT
    assert plan.kv_misses == pool([turn.pages for turn in turns_of(trace)], plan.kv_pages)
    assert plan.step_s and plan.step_s > 1e-3 and plan.tokens_per_s


def test_more_memory_is_never_predicted_to_miss_more(planner):
    plans = [planner.split(memory << 20) for memory in (2, 3, 4, 6)]
    lost = [p.miss_s for p in plans]
    assert lost == sorted(lost, reverse=True) and lost[0] > lost[-1]


def test_refusals(planner, trace):
    with pytest.raises(UserError, match="leaves KV 96 tokens, fewer than its floor of 256"):
        planner.split(100 << 10)
    decode = {n: dataclasses.replace(cost, fill=0.0) for n, cost in COSTS.decode.items()}
    free = dataclasses.replace(COSTS, decode=decode)
    with pytest.raises(UserError, match="a missing expert costs nothing"):
        Planner(trace, free).split(MEMORY)
    with pytest.raises(UserError, match="0 bytes are less than one slot, which has 98304"):
        planner.split(0)


def test_a_trace_in_which_no_request_ends(trace, tmp_path):
    steps = [step._replace(finished=()) for step in trace.step_traces()]
    with pytest.raises(UserError, match="no request ends in the trace"):
        Planner(rewritten(tmp_path / "t", trace, steps), COSTS)


def test_a_trace_of_two_versions_is_refused(trace):
    spec = {**trace.header.spec, "version_bytes": {"dense": SLOT, "int4": SLOT // 4}}
    mixed = dataclasses.replace(trace, header=dataclasses.replace(trace.header, spec=spec))
    with pytest.raises(UserError, match=r"mixes dense and int4, .* a plan is of one version"):
        Planner(mixed, COSTS)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"expert_bytes": SLOT // 2}, "experts have 49152 bytes over the link, the trace's 98304"),
        ({"layers": 3}, "they are of MoE layers 3, the trace is of 4"),
        ({"about": {"dtype": "float16"}}, "they are of dtype float16, the trace is of bfloat16"),
        ({"about": {"model": "another"}}, "they are of model another"),
    ],
)
def test_costs_of_other_steps_than_the_traces(trace, changes, match):
    with pytest.raises(UserError, match=match):
        Planner(trace, dataclasses.replace(COSTS, **changes))


def test_a_split_has_a_timeline(trace, planner):
    events = planner.timeline(planner.split(MEMORY))
    assert {event.track for event in events} == {"device"}
    found = predict(trace, COSTS, cells=planner.split(MEMORY).cells, driver="device")
    assert max(event.end for event in events) == pytest.approx(found.seconds.sum())
    queued = Planner(trace, COSTS, queue=Link(1e9)).timeline(planner.split(MEMORY))
    assert {event.track for event in queued} == {"device", "link"}


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    return status, *capsys.readouterr()


def test_a_plan_runs(trace, costs, capsys, tmp_path):
    """The file that --output writes is a run's split, and its tokens are any other's."""
    output = str(tmp_path / "plan.json")
    where = ("--trace", str(trace.directory), "--costs", costs)
    options = ("--memory", "3MiB", "--cells", "marginal", "--output", output)
    drawn = tmp_path / "timeline.json"
    status, out, _ = run(capsys, *where, *options, "--timeline", str(drawn))
    assert status == 0 and f"run with --config {output}" in out
    assert len(json.loads(drawn.read_text())["traceEvents"]) > 100
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["everybody"][-1] == "MiB" and f"{trace.tokens:,}" in lines["everybody"]
    assert sum(line.split()[:1] == ["user"] for line in out.splitlines()) == 5
    assert "time per token (a decode step)" in out and "KV pages that come back" in out
    with LLM("demo", progress=False, **LIMITS, **read_options(output)) as llm:
        arena = llm.stats()["arena"]
    assert arena["bytes"] <= MEMORY
    status, out, _ = run(capsys, *where, "--memory", "3MiB", "--cells", "marginal", "--json")
    plan = json.loads(out)
    assert plan["cells"] == arena["cells_per_layer"] and plan["kv_pages"] == arena["kv_pages"]


def test_a_split_as_options(trace, costs, capsys):
    where = ("--trace", str(trace.directory), "--costs", costs, "--memory", "3MiB")
    status, out, _ = run(capsys, *where)
    assert status == 0
    assert re.fullmatch(r"--expert-budget \d+ --kv-budget \d+", out.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "give --memory for a split"),
        (("--memory", "3MiB", "--remember"), "or --remember alone"),
        (("--remember", "--output", "x"), "or --remember alone"),
        (("--memory", "3MiB", "--transfers", "queue,latency=20us"), "give its rate too"),
        (("--memory", "3MiB", "--timeline", "x.svg"), "a timeline is FILE.json"),
        (("--memory", "3MiB", "--timeline", "no/x.json"), "its folder does not exist"),
    ],
)
def test_commands_that_mean_nothing(trace, capsys, arguments, match):
    status, out, err = run(capsys, "--trace", str(trace.directory), *arguments)
    assert status == 2 and out == "" and match in err


def test_costs_are_those_of_the_traces_model_on_this_machine(trace, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no costs of the trace's model .* were measured on this"):
        costs_of_trace(trace)
    directory = tmp_path / "moejax" / "costs"
    directory.mkdir(parents=True)
    header = trace.header
    about = {"model": header.config_digest, "machine": platform.node(), "driver": "device"}
    about |= {"device": header.machine["device"], "dtype": header.spec["dtype"]}

    def put(name: str, created: str, expert_bytes: int = SLOT, **changes) -> None:
        said = {**about, "created": created, **changes}
        model = dataclasses.replace(COSTS, about=said, expert_bytes=expert_bytes)
        (directory / name).write_text(json.dumps(model.to_json()))

    put("other.json", "2031", model="another")
    put("gpu.json", "2031", device="Some GPU")
    put("dtype.json", "2031", dtype="float16")
    put("host.json", "2031", driver="host")
    with pytest.raises(UserError, match="no costs of the trace's model"):
        costs_of_trace(trace)
    put("int4.json", "2031", SLOT // 4)
    with pytest.raises(UserError, match=r"int4\.json does not fit: their experts have 24576 bytes"):
        costs_of_trace(trace)
    put("a.json", "2030", here="new")
    put("b.json", "2029", here="old")
    (directory / "damaged.json").write_text("{")
    assert costs_of_trace(trace).about["here"] == "new"
    put("c.json", "2028", here="same shapes", shapes=header.spec["shapes"])
    assert costs_of_trace(trace).about["here"] == "same shapes"
    # A file that is named may be of another device: what a trace says holds for any.
    assert costs_of_trace(trace, directory / "gpu.json").about["device"] == "Some GPU"
