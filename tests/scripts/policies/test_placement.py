"""`python -m scripts.policies placement`: every arm over a trace."""

import json

import pytest

from host_offload.policies.prefetch.llapor.training import Training, fit
from host_offload.traces.reader import read_trace
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
    assert len(found) == len(lines) == 2 * 4 + 4 + 2
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
        (["--resident", "2"], "--resident lies in 0…1, not 2.0"),
        (["--predictor", "/nowhere"], "/nowhere: cannot be read"),
    ):
        assert main([trace, *given]) == 2
        assert match in capsys.readouterr().err
    inputs, ids, _ = deterministic()
    other = trace_of(tmp_path / "other", inputs, ids, config_digest="ab" * 32)
    file = str(tmp_path / "learned")
    fit(other, training=Training(width=16, epochs=1)).fitted.write(file)
    assert main([trace, "--predictor", file]) == 2
    assert "is of another model, or its stride is not 1" in capsys.readouterr().err
