"""The command `curves` runs, and says what it was asked; figures are what the other tests hold."""

import json

import pytest

from scripts.budgets import curves as bench_budget

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
def test_what_it_refuses(capsys):
    assert bench_budget.main(["halves", "--layers", "0"]) == 2
    assert "error" in capsys.readouterr().err
