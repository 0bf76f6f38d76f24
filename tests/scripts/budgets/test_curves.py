"""The command `curves` runs, and says what it was asked; figures are what the other tests hold."""

import json

import numpy as np
import pytest

from scripts.budgets import curves as bench_budget
from tests.host_offload.traces.traces_of import random_routing, write_trace

SMALL = ["--layers", "2", "--experts", "16", "--top-k", "2", "--json"]


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_controller_is_measured(capsys):
    arguments = ["controller", *SMALL, "--batches", "1,2", "--steps", "16", "--turn", "8"]
    assert bench_budget.main(arguments) == 0
    found = lines(capsys)
    assert {(x["policy"], x["batch"]) for x in found} == {
        (name, batch) for name in bench_budget.policies() for batch in (1, 2)
    }
    assert all(x["steps"] == 16 and x["turns"] == 2 and x["amortised_us"] > 0 for x in found)


@pytest.mark.slow
def test_a_half_tells_the_other(capsys):
    """Also at a small size the error is some percent, and the interval holds its mean."""
    assert bench_budget.main(["halves", *SMALL, "--seeds", "3", "--steps", "800"]) == 0
    found = lines(capsys)
    assert [x["cells"] for x in found] == [2, 4, 6, 8, 10, 12, "all"]
    for x in found:
        assert x["low"] <= x["error"] <= x["high"] and abs(x["signed"]) <= x["error"] + 1e-12
    assert found[0]["error"] < 0.05


@pytest.mark.slow
def test_curves_of_a_trace_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    routing = random_routing(np.random.default_rng(0), 40, 2, 8, 2)
    shapes = {"page_tokens": 4, "page_bytes": 20, "slots": 16}
    trace = write_trace(tmp_path / "t", routing, 8, spec=shapes)
    arguments = ["curves", str(tmp_path / "out"), "--trace", str(trace.directory)]
    assert bench_budget.main([*arguments, "--page-s", "1e-9"]) == 0
    found = {x["who"]: x for x in lines(capsys)}
    assert set(found) == {"configurator", "equation (5)", "argmin of (4)", "50–50"}
    assert found["argmin of (4)"]["seconds"] == min(x["seconds"] for x in found.values())
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "out" / "curves.json").read_text())["settled"]


@pytest.mark.slow
def test_what_it_refuses(tmp_path, capsys):
    assert bench_budget.main(["curves", str(tmp_path), "--trace", "/no/such"]) == 2
    assert "is no trace" in capsys.readouterr().err
    assert bench_budget.main(["curves", str(tmp_path), "--memory", "100"]) == 2
    assert "no cap from 0 on works" in capsys.readouterr().err
    assert bench_budget.main(["halves", "--layers", "0"]) == 2
