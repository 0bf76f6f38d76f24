"""The command `steps`: what it times and when it says that the goal is met. No claim is made."""

from __future__ import annotations

import argparse
import json

import pytest

from scripts.budgets import steps as bench_resize
from scripts.budgets.steps import Times, _add, _report, decode_times, engine_of, use


@pytest.mark.nightly
@pytest.mark.parametrize("model", [(), ("--shape", "demo", "--layers", "2")])
def test_resizes_are_timed(model, capsys):
    arguments = ["--resizes", "4", "--every", "3", "--batch", "2"]
    assert bench_resize.main([*arguments, "--json", *model]) == 0
    *lines, verdict = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = {line["steps"]: line["count"] for line in lines}
    # A resize touches two steps, and as many rounds run without.
    assert counts["of a resize"] >= 2 * 4
    assert counts["without resizes"] == counts["of a resize"] + counts["between resizes"]
    assert all(line["failed"] == 0 and line["resizes"] >= 4 for line in lines)
    assert lines[0]["pages_moved"] > 0
    assert verdict["ratio"] == lines[0]["ratio"]


@pytest.mark.parametrize(("slow", "within"), [(1.1, True), (1.3, False)])
def test_the_goal_is_of_the_steps_of_a_resize(slow, within):
    """Slow steps elsewhere are the machine's, and shown; those of a resize decide, every one."""
    times = {
        "of a resize": Times([slow] * 200, [3] * 200, [slow] * 200),
        "between resizes": Times([1.0] * 600, [2] * 600, [1.0] * 600),
        "without resizes": Times([1.0] * 780 + [5.0] * 20, [2] * 800, [1.0] * 800),
    }
    args = argparse.Namespace(json=True)
    *lines, verdict = map(json.loads, _report(args, "cpu", times, {"failed": 0}))
    assert [line["misses"] for line in lines] == [3, 2, 2]
    assert verdict["within"] is within and verdict["ratio"] == pytest.approx(slow)
    assert verdict["without"] == pytest.approx(5.0)
    args = argparse.Namespace(json=False, model="demo", shape=None, batch=8)
    assert "too busy to tell" in [*_report(args, "cpu", times, {})][-1]


def test_what_is_refused(capsys):
    assert bench_resize.main(["--every", "0"]) == 2
    assert bench_resize.main(["--batch", "0"]) == 2
    assert bench_resize.main(["--length", "112"]) == 2
    assert bench_resize.main(["--layers", "2"]) == 2
    assert bench_resize.main(["--shape", "other"]) == 2
    said = capsys.readouterr().err
    assert "--every must be at least 1" in said and "--batch must be at least 1" in said
    assert "--length must be above 112, got 112" in said
    assert "--layers are of a --shape" in said and "shape 'other' is unknown" in said


def test_a_step_is_compared_with_the_same_one_in_other_rounds():
    """Two steps of three rounds without resizes, of 1, 2, 3 and 10, 20, 30 s; three with a resize
    before the second step, which the first, that runs meanwhile, belongs to as well."""
    times = {name: Times() for name in ("of a resize", "between resizes", "without resizes")}
    still = [(True, [(False, False, 1.0 * n, 0), (False, False, 10.0 * n, 0)]) for n in (1, 2, 3)]
    seconds = ((4.0, 30.0), (6.0, 90.0), (3.0, 32.0))
    moves = [(False, [(False, True, a, 0), (True, False, b, 0)]) for a, b in seconds]
    _add(times, [still[0], moves[0], *still[1:], *moves[1:]])
    assert times["of a resize"].ratios == [2.0, 1.5, 3.0, 4.5, 1.5, 1.6]
    assert not times["between resizes"].ratios
    assert times["without resizes"].ratios == [0.4, 0.4, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.nightly
def test_only_steps_of_a_full_batch_are_timed():
    """Three sequences of different lengths on two rows: as the last one ends alone, its steps
    compute one row."""
    sizes = dict(every=2, batch=2, length=256, shape=None, layers=None, memory=None)
    args = argparse.Namespace(model="demo", **sizes)
    with engine_of(args) as engine:
        use(engine, None)
        found, tokens = decode_times(engine, [[1, 2, 3], [4, 5], [6, 7]], [6, 4, 12])
    # Each decode step gives one token a row; the first of a sequence comes from its prefill.
    assert [len(said) for said in tokens] == [6, 4, 12]
    assert 0 < len(found) <= 3 + 2
    assert not any(moved or next_moved for moved, next_moved, *_ in found)
