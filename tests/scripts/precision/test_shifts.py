"""How soon DynaExq follows is what a trace says, and pictures show what a trace has."""

from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.interface import Transition
from host_offload.traces.reader import TraceError, TransferTrace, read_trace
from moejax.errors import UserError
from scripts.parts.version_history import steps_to_converge, version_history
from scripts.precision import plot as plot_versions
from scripts.precision import shifts
from tests.host_offload.traces.traces_of import write_trace


def test_agreement_is_of_the_text_that_a_step_is_in():
    version = np.array([[[1, 1, 1, 1]], [[0, 1, 1, 1]], [[0, 0, 1, 1]], [[1, 0, 1, 0]]], np.int8)
    history = SimpleNamespace(tokens=np.array([4, 4, 4, 4]), version=version)
    wanted = [np.array([[1, 1, 0, 0]], bool), np.array([[0, 0, 0, 1]], bool)]
    # The step that begins with token 4 is the first text's, although token 7 is in it.
    found = shifts.agreement(history, [7, 9], wanted)
    assert found == [[[0, 0.0], [4, 0.5]], [[1, 0.0], [5, 1.0]]]


def test_tokens_to_follow():
    curve = [[0, 0.2], [100, 0.4], [200, 0.7], [300, 0.8], [400, 0.8]]
    assert shifts.tokens_to_follow(curve, 0.8) == 300
    assert shifts.tokens_to_follow(curve, 0.7) == 200
    assert shifts.tokens_to_follow(curve, 1.0) is None
    assert shifts.tokens_to_follow(curve, 0.1) == 0  # it began beyond that
    assert shifts.level(curve) == pytest.approx(np.mean([0.7, 0.8, 0.8]))


def test_arms_are_measured_against_transitions_that_block():
    def line(arm, curve):
        curves = {"x": [[0, 0.0], [100, 1.0]], "y": curve}
        return {"arm": arm, "agreement": curves, "steps": 10, "transitions": 5, "perplexity": 2.0}

    slow = [[0, 0.2], [50, 0.4], [100, 0.6]]
    quick = [[0, 0.2], [50, 0.8], [100, 0.8]]
    rows = [*shifts.report([line("few", slow), line("blocking", quick)])]
    assert [row.split()[-6:-2] for row in rows[1:]] == [
        ["80%", "–", "(0", "of"],
        ["80%", "50", "(1", "of"],
    ]


@pytest.mark.slow  # five engines
def test_a_small_model_is_followed(tmp_path, capsys, monkeypatch):
    arms = {name: shifts.ARMS[name] for name in ("2 spares, steps of 64", shifts.BLOCKING)}
    monkeypatch.setattr(shifts, "ARMS", arms)
    told = [str(tmp_path), "--text", "story", "math", "--windows", "1"]
    assert shifts.main([*told, "--interval", "128 tokens"]) == 0
    assert "blocking" in capsys.readouterr().out
    assert (tmp_path / "convergence.png").stat().st_size > 10_000


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    assert shifts.main([str(tmp_path), "--text", "none.txt"]) == 2
    assert "there is no text 'none.txt'" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no text"):
        shifts.read_text("none")
    assert plot_versions.main([str(tmp_path), str(tmp_path)]) == 2
    assert "is no trace" in capsys.readouterr().err


# ---- the history of a trace


START = [[1, 1, 1, 1], [0, 1, 1, 1]]


@pytest.fixture
def trace(tmp_path):
    """Six steps of two layers of four experts. Decided after step 1: two promotions and a
    demotion; step 3 carries out two of them, step 4 the last one."""
    spec = {"version_bytes": {"dense": 100, "int4": 30}, "precision": {"start": START}}
    ids = np.zeros((3, 2, 1))
    write_trace(tmp_path / "t", [ids] * 6, 4, spec=spec, chunk_bytes=1)
    # The writer of traces_of writes no transfers, so they are put behind it.
    return read_trace(tmp_path / "t")


MOVED = (
    TransferTrace(0, 2, 0, 100, 3, 3, 4, "promotion"),
    TransferTrace(1, 0, 1, 30, 3, 3, -1, "demotion"),
    TransferTrace(1, 3, 0, 100, 3, -1, -1, "promotion"),
    TransferTrace(1, 3, 0, 100, 4, 4, 5, "promotion"),
    TransferTrace(0, 0, 0, 100, 4, 4, 5, "prefetch"),
)


def test_a_history_is_what_the_transfers_made(trace, monkeypatch):
    wanted = [Transition(0, 2, 0), Transition(1, 3, 0), Transition(1, 0, 1)]
    decisions = [
        {"step": 1, "moment": "INTERVAL", "decision": {"transitions": [[*t] for t in wanted]}},
        {"step": 3, "moment": "INTERVAL", "decision": {"transitions": "as before"}},
    ]
    monkeypatch.setattr(type(trace), "transfers", lambda self: iter(MOVED))
    monkeypatch.setattr(type(trace), "decisions", lambda self: iter(decisions))
    history = version_history(trace)
    assert history.version[3].tolist() == START  # carried out behind its experts
    assert history.version[4].tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert history.version[5].tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert history.moved["promotion"].tolist() == [0, 0, 0, 1, 1, 0]
    assert history.moved["demotion"].tolist() == [0, 0, 0, 1, 0, 0]
    assert history.bytes.tolist() == [0, 0, 0, 130, 100, 0]
    assert history.waiting.tolist() == [0, 0, 3, 3, 1, 0]
    assert history.resident_bytes.tolist() == [310] * 4 + [310, 380]
    assert history.tokens.tolist() == [3] * 6
    top = np.array([[0, 0, 1, 0], [0, 0, 0, 1]], bool)
    assert steps_to_converge(history, top, 1, 6) == 4
    assert steps_to_converge(history, top, 1, 6, within=0.5) == 3
    assert steps_to_converge(history, top, 0, 4) is None


def test_a_run_with_one_version_has_no_history(tmp_path):
    trace = write_trace(tmp_path / "t", [np.zeros((1, 1, 1))], 2)
    with pytest.raises(TraceError, match="one version of each expert; record one with --precision"):
        version_history(trace)
