"""`python -m scripts.policies calls`: what a prediction takes, of a file and of a model's sizes."""

import json

import numpy as np
import pytest

from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.training import Training, fit
from scripts.policies.calls import drawn, main
from tests.host_offload.policies.prefetch.llapor.test_llapor import ROWS, deterministic, trace_of

pytestmark = pytest.mark.slow


def test_a_line_for_each_layer(tmp_path, capsys):
    inputs, ids, _ = deterministic()
    file = str(tmp_path / "learned")
    trace = trace_of(tmp_path / "trace", inputs, ids)
    fit(trace, training=Training(width=16, epochs=1)).fitted.write(file)
    assert main([file, "--rows", "1,8", "--repeats", "3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["layer"] for line in lines] == [1, 2, 3]
    assert all(len(line["us"]) == 2 and min(line["us"]) > 0 for line in lines)
    assert main(["--like", "64,8", "--repeats", "2"]) == 0
    assert "µs at 64" in capsys.readouterr().out


def test_learning_on_is_worth_something_where_the_text_changed(tmp_path, capsys):
    """Networks of one model's routing, then a trace of another one's."""
    file = str(tmp_path / "learned")
    inputs, ids, _ = deterministic()
    fit(trace_of(tmp_path / "own", inputs, ids), training=Training(width=64)).fitted.write(file)
    inputs, ids, _ = deterministic(seed=1)
    other = trace_of(tmp_path / "other", inputs, ids)
    command = [file, "--shifted", str(other.directory), "--learn", "16,40,3e-3", "--json"]
    assert main(command) == 0
    first, *_, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert last["learning"] > last["frozen"] + 0.1
    assert first["frozen"] == pytest.approx(last["frozen"], abs=0.1)
    assert first["part"] == 1 and last["part"] == 4
    assert last["steps"] == other.steps // 4 and last["rows"] == last["steps"] * ROWS
    # Nothing is learned from what is still to come.
    assert main([*command, "--learn", "16,40,1e-12"]) == 0
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        assert line["learning"] == pytest.approx(line["frozen"], abs=0.01)


def test_drawn_networks_have_the_paper_s_sizes():
    arrays = drawn(4096, 64)
    middle = of_layer(arrays, 1)
    assert of_layer(arrays, 0)["basis"].shape == (4096, 256) and middle["basis"].shape[1] == 512
    found = scores(middle, np.zeros((3, 4096), np.float32), np.zeros((3, 1), int), np.ones((3, 1)))
    assert found.shape == (3, 64) and np.isfinite(found).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give a FILE, or --like"),
        (["/nowhere", "--like", "8,4"], "give a FILE, or --like"),
        (["/nowhere"], "/nowhere: cannot be read"),
        (["--like", "8,4", "--rows", "0"], "rows and --repeats are 1 or more"),
    ],
)
def test_what_is_refused(given, message, capsys):
    assert main(given) == 2
    assert message in capsys.readouterr().err
