"""What commands share: refusals, numbers, lines as JSON or as text, histories of versions."""

import argparse
import dataclasses

import numpy as np
import pytest

from host_offload.memory.budget import BudgetError
from host_offload.traces.reader import TransferTrace, read_trace
from moejax import UserError
from scripts.parts.commands import positive, refusing
from scripts.parts.text_table import aligned, show
from scripts.parts.version_history import version_history
from tests.host_offload.traces.traces_of import write_trace


@pytest.mark.parametrize("error", [UserError("no"), BudgetError("no"), OSError("no")])
def test_what_a_user_can_change_is_said_in_a_line(capsys, error):
    @refusing(OSError)
    def main() -> int:
        raise error

    assert main() == 2
    assert capsys.readouterr().err.endswith(" test_parts: error: no\n")


def test_numbers_below_one_are_refused():
    args = argparse.Namespace(steps=1, layers=None, warm_up=0)
    positive(args, "steps", "layers")
    with pytest.raises(UserError, match="--warm-up must be at least 1, got 0"):
        positive(args, "steps", "warm_up")


def test_lines_are_json_or_text(capsys):
    show(True, [{"a": 1}, {"a": 2}], ["table"])
    show(False, [{"a": 1}], ["table"])
    assert capsys.readouterr().out == '{"a": 1}\n{"a": 2}\ntable\n'
    assert [*aligned((("ms", "{a:.1f}"),), [{"a": 10.0}, {"a": None}])] == ["  ms", "10.0", "   –"]


START = [[1, 1, 1, 1], [0, 1, 1, 1]]
MOVED = (
    TransferTrace(0, 2, 0, 100, 3, 3, 3, "promotion"),
    TransferTrace(1, 0, 1, 30, 3, 3, -1, "demotion"),
    TransferTrace(1, 3, 0, 100, 4, 4, 5, "promotion"),
)
WANTED = {"transitions": [[0, 2, 0], [1, 3, 0], [1, 0, 1]]}


@pytest.mark.parametrize(("blocking", "later"), [(False, 1), (True, 0)])
def test_a_step_that_waits_computes_with_what_it_waited_for(blocking, later, tmp_path, monkeypatch):
    """A list is carried out behind a step's experts, or, where the step waits, before them: the
    first transfer was first used by the very step that carried it out."""
    spec = {
        "version_bytes": {"dense": 100, "int4": 30},
        "precision": {"start": START},
        "resident": {"blocking": blocking, "start": START},
    }
    write_trace(tmp_path / "t", [np.zeros((3, 2, 1))] * 6, 4, spec=spec)
    trace = read_trace(tmp_path / "t")
    monkeypatch.setattr(type(trace), "transfers", lambda self: iter(MOVED))
    decisions = [{"step": 2, "moment": "INTERVAL", "decision": WANTED}]
    monkeypatch.setattr(type(trace), "decisions", lambda self: iter(decisions))
    history = version_history(trace)
    assert history.version[2 + later].tolist() == START
    assert history.version[3 + later].tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert history.version[4 + later].tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert history.waiting.tolist() == [0, 0, 0, *([3, 1, 0] if later else [1, 0, 0])]
    assert dataclasses.asdict(history)["bytes"].tolist() == [0, 0, 0, 130, 100, 0]
