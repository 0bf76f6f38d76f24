"""What commands share: refusals, numbers, intervals, and their lines as JSON or as text."""

import argparse

import numpy as np
import pytest

from host_offload.memory.budget import BudgetError
from moejax import UserError
from scripts.check import paired
from scripts.parts.commands import positive, refusing
from scripts.parts.intervals import bootstrap
from scripts.parts.text_table import show


@pytest.mark.parametrize("error", [UserError("no"), BudgetError("no"), OSError("no")])
def test_what_a_user_can_change_is_said_in_a_line(capsys, error):
    @refusing(OSError)
    def main() -> int:
        raise error

    assert main() == 2
    assert capsys.readouterr().err.endswith(" test_commands: error: no\n")


def test_other_errors_are_raised():
    @refusing()
    def main() -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        main()


def test_numbers_below_one_are_refused():
    args = argparse.Namespace(steps=1, layers=None, warm_up=0)
    positive(args, "steps", "layers")
    with pytest.raises(UserError, match="--warm-up must be at least 1, got 0"):
        positive(args, "steps", "warm_up")


def test_lines_are_json_or_text(capsys):
    show(True, [{"a": 1}, {"a": 2}], ["table"])
    show(False, [{"a": 1}], ["table"])
    assert capsys.readouterr().out == '{"a": 1}\n{"a": 2}\ntable\n'


def test_an_interval_holds_the_statistic():
    values = np.arange(101.0) ** 2
    for statistic in (np.median, np.mean):
        low, high = bootstrap(values, statistic)
        assert 0 < low < statistic(values) < high < 1e4
    assert bootstrap(np.full(5, 3.0)) == (3.0, 3.0)


def test_requests_that_differ_are_named(capsys, tmp_path, monkeypatch):
    given = {"here": {"a": [1], "b": [2]}, "there": {"a": [1], "b": [3], "c": [4]}}

    def python_in(checkout, script, file, *models):
        assert models == ("demo",)
        np.savez(file, **{name: np.array(value) for name, value in given[checkout.name].items()})
        return "written"

    monkeypatch.setattr(paired, "HERE", tmp_path / "here")
    monkeypatch.setattr(paired, "python_in", python_in)
    assert paired.main([str(tmp_path / "there"), "--requests"]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == ["differs: b", "differs: c"]
    given["there"] = given["here"]
    assert paired.main([str(tmp_path / "there"), "--requests"]) == 0
    assert "all bits are equal" in capsys.readouterr().out
