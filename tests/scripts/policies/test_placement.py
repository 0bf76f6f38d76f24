"""`python -m scripts.policies placement`: every arm over a trace."""

import dataclasses
import json

import numpy as np
import pytest

from host_offload.policies.placement.caches import Horizon
from host_offload.policies.prefetch.expertflow import training as forests
from host_offload.policies.prefetch.expertflow.policy import read
from host_offload.policies.prefetch.llapor.training import Training, fit, split
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import read_trace
from scripts.policies import placement
from scripts.policies.placed_arms import ARMS
from scripts.policies.placement import main
from tests.host_offload.policies.prefetch.expertflow.test_expertflow import observed
from tests.host_offload.policies.prefetch.llapor.test_llapor import (
    EXPERTS,
    LAYERS,
    deterministic,
    trace_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    inputs, ids, _ = deterministic()
    return str(trace_of(tmp_path_factory.mktemp("trace"), inputs, ids).directory)


def test_every_arm_has_a_line(trace, tmp_path, capsys):
    file = str(tmp_path / "learned")
    fit(read_trace(trace), training=Training(width=16, epochs=2)).fitted.write(file)
    given = [trace, "--predictor", file, "--resident", "0.25"]
    assert main([*given, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(line["arm"], line["predictor"]): line for line in lines}
    # Of the learned predictions, which look one layer ahead, ExpertFlow has none.
    ahead = sum(arm.reach > 0 for arm in ARMS.values())
    assert len(found) == len(lines) == 2 * ahead - 1 + (len(ARMS) - ahead) + 2
    assert lines[0]["ratio"] == 1.0 and lines[0]["predictor"] == "learned"
    assert found["fiddler", ""]["ahead"] == 0 == found["fiddler", ""]["link"]
    assert found["fiddler", ""]["step_us"] > found["prescope", "right"]["step_us"]
    assert all(0 <= line["link"] <= 1 for line in lines)
    assert main([*given]) == 0
    said = capsys.readouterr().out
    assert "15 steps of 16.0 uses a layer; 8 resident" in said and "no hot table" in said


def test_what_is_refused(trace, tmp_path, capsys):
    for given, match in (
        (["--costs", "1,2"], "--costs are five"),
        (["--resident", "2"], "--resident lies in 0…1, not 2"),
        (["--predictor", "/nowhere"], "/nowhere: cannot be read"),
    ):
        assert main([trace, *given]) == 2
        assert match in capsys.readouterr().err
    inputs, ids, _ = deterministic()
    other = trace_of(tmp_path / "other", inputs, ids, config_digest="ab" * 32)
    file = str(tmp_path / "learned")
    fit(other, training=Training(width=16, epochs=1)).fitted.write(file)
    assert main([trace, "--predictor", file]) == 2
    assert "learned was fitted to a model of configuration abababababab" in capsys.readouterr().err


def test_a_grid_has_a_column_a_cell(trace, capsys):
    """Two shares and two loads; a dearer load makes loading everybody worse beside PreScope, and a
    greater table makes every arm that computes misses on the CPU better."""
    given = [trace, "--resident", "0.25,0.5", "--loads", "4,16", "--steps", "6"]
    assert main([*given, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cells = {(line["resident"], line["load"]) for line in lines}
    assert cells == {(share, load) for share in (0.25, 0.5) for load in (4.0, 16.0)}

    def line(arm: str, share: float, load: float) -> dict:
        keys = (arm, share, load, "")
        (found,) = [
            each
            for each in lines
            if (each["arm"], each["resident"], each["load"], each["predictor"]) == keys
        ]
        return found

    assert line("klotski", 0.25, 16)["ratio"] > line("klotski", 0.25, 4)["ratio"]
    assert line("fiddler", 0.5, 4)["step_us"] < line("fiddler", 0.25, 4)["step_us"]
    assert main(given) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + len(lines) // 4 and "50% 16" in said[0]


# ---- ExpertFlow's forests


@pytest.fixture(scope="module")
def forest(trace, tmp_path_factory) -> str:
    """Learned from the requests that are not played."""
    given, router = read_trace(trace), deterministic()[2]
    quick = forests.Training(trees=5, leaves=64, reach=3)
    rows = split(given, (0.8,))[0]
    file = tmp_path_factory.mktemp("forest") / "forest"
    forests.fit(given, router, training=quick, rows=rows).fitted.write(file)
    return str(file)


@pytest.fixture
def routers(monkeypatch):
    """Of the model that the trace is of, which has no checkpoint."""
    monkeypatch.setattr(placement, "routers_of", lambda *_: deterministic()[2])


def lines_of(capsys, given: list[str]) -> dict[tuple[str, str], dict]:
    assert main([*given, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {(line["arm"], line["predictor"]): line for line in lines}


def test_expertflow_goes_by_its_forests(trace, forest, routers, capsys, monkeypatch):
    """Where gates fail and forests do not, its steps are as short as those of an arm that knows
    what is to come; no other line changes. The step size adapts."""
    given = [trace, "--model", "it", "--resident", "0.5"]
    plain = lines_of(capsys, given)
    found = lines_of(capsys, given := [*given, "--forest", forest])
    mine = found.pop(("expertflow", "forest"))
    assert found == plain
    gates, right = (found["expertflow", name]["step_us"] for name in ("gate", "right"))
    assert mine["step_us"] < 0.9 * gates and mine["step_us"] < 1.02 * right
    given = [*given, "--costs", "1,0,16,1,60"]
    mine = lines_of(capsys, given)["expertflow", "forest"]
    monkeypatch.setattr(Horizon, "adjusted", lambda self, late, unused: self)
    still = lines_of(capsys, given)["expertflow", "forest"]
    assert still["step_us"] > mine["step_us"] and still["ahead"] > mine["ahead"]


def test_the_forests_say_what_they_say_in_the_engine(trace, forest, routers):
    """Whom a layer is predicted to use, rows each, beside whom the policy wants of the same step's
    rows with the largest step size."""
    given = read_trace(trace)
    args = placement._parser().parse_args([trace, "--forest", forest, "--model", "it"])
    predicted = placement._routed(args, given).work.predicted["forest"]
    assert predicted.shape[2] == 3  # --reach of the training, not this command's
    policy = read(forest)
    spec = dataclasses.replace(spec_of(given.header), router=deterministic()[2])
    nobody = np.full((LAYERS, EXPERTS), -1, np.int8)
    kinds = [step.kind for step in given.step_traces()]
    last = max(place for place, kind in enumerate(kinds) if kind == "decode")
    state = policy.init(spec)
    for layer in range(LAYERS):
        state = state._replace(horizon=Horizon(3, 3))
        state, _ = policy.decide(state, observed(given, layer, nobody, last))
        wanted = {each.layer - layer: {*each.experts} for each in state.ahead}
        found = {d: {*np.flatnonzero(predicted[-1, layer, d - 1])} for d in wanted}
        assert found == wanted and len(wanted) == min(state.horizon.steps, LAYERS - 1 - layer)


def test_forests_that_cannot_be_used_are_refused(trace, forest, routers, tmp_path, capsys):
    inputs, ids, _ = deterministic()
    other = trace_of(tmp_path / "other", inputs, ids, config_digest="ab" * 32)
    blind = trace_of(tmp_path / "blind", inputs, ids, gate_input=0)
    networks = str(tmp_path / "learned")
    fit(read_trace(trace), training=Training(width=16, epochs=1)).fitted.write(networks)
    model = ["--model", "it"]
    for given, match in (
        ([trace, "--forest", forest], "name it with --model"),
        ([str(other.directory), "--forest", forest, *model], "fit it to a trace of this model"),
        ([str(blind.directory), "--forest", forest, *model], "record one with --trace-arrays gate"),
        ([trace, "--forest", networks, *model], "was fitted for 'learned', not for 'expertflow'"),
        ([trace, "--predictor", forest], "was fitted for 'expertflow', not for 'learned'"),
        ([trace, "--forest", "/nowhere", *model], "/nowhere: cannot be read"),
    ):
        assert main(given) == 2
        assert match in capsys.readouterr().err
