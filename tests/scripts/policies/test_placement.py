"""`python -m scripts.policies placement`: every arm over a trace."""

import json

import pytest

from host_offload.policies.prefetch.llapor.training import Training, fit
from host_offload.traces.reader import read_trace
from scripts.policies.placed_arms import ARMS
from scripts.policies.placement import main
from tests.host_offload.policies.prefetch.llapor.test_llapor import deterministic, trace_of

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
