"""`python -m scripts.policies calls`: what a prediction takes, of a file and of a model's sizes."""

import json

import numpy as np
import pytest

from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.training import Training, fit
from scripts.policies.calls import drawn, main
from tests.host_offload.policies.prefetch.llapor.test_llapor import deterministic, trace_of

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
