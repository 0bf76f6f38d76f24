"""What compare_precision.py says is what the windows say, and pictures show what a trace has."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.policy import Transition
from host_offload.traces import TraceError, TransferTrace, read_trace
from host_offload.version_history import steps_to_converge, version_history
from moejax.errors import UserError
from pallas_kernels.records import RecordFormat
from tests.host_offload.traces_of import write_trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_precision
import plot_versions
import precision_report


def line(values, arm="an arm", **more):
    nll = {name: list(map(float, of)) for name, of in values.items()}
    return {"pair": "a/b@int8", "arm": arm, "nll": nll, "tokens": 10, **more}


# ---- figures


def test_perplexity_counts_every_token_alike():
    found = line({"x": [10, 20], "y": [30]})
    assert precision_report.perplexity(found) == pytest.approx(np.exp(60 / 30))
    assert precision_report.perplexity(found, ["y"]) == pytest.approx(np.exp(3))


def test_a_paired_interval_is_narrow_where_windows_differ_and_arms_do_not():
    rng = np.random.default_rng(1)
    windows = {"x": rng.normal(30, 8, 40), "y": rng.normal(20, 8, 40)}
    worse = {name: values + 0.1 + rng.normal(0, 0.02, 40) for name, values in windows.items()}
    gap, low, high = precision_report.difference(line(worse), line(windows))
    assert low < gap < high and high - low < 0.2
    # A hundredth of a nat a token is one per cent of perplexity.
    assert gap == pytest.approx(100 * np.expm1(0.01), rel=0.1) and low > 0
    # The other way about, with the same draws.
    back = precision_report.difference(line(windows), line(worse))
    assert back[1] < back[0] < back[2] < 0
    same = precision_report.difference(line(windows), line(windows))
    assert same == (0, 0, 0)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """95% of intervals over drawn windows hold the difference that they were drawn with."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        base = {"x": np.zeros(25)}
        gaps = {"x": rng.normal(0.1, 0.3, 25)}
        _, low, high = precision_report.difference(line(gaps), line(base))
        inside += low <= 100 * np.expm1(0.01) <= high
    assert 0.88 < inside / 200 <= 0.99


def test_orders_and_seeds_are_one_arm():
    lines = [
        line({"x": [1, 2]}, "random 0"),
        line({"x": [3, 4]}, "random 1"),
        line({"x": [5, 5]}, "calibrated on all"),
    ]
    arms = precision_report.arms_of(lines, "a/b@int8")
    assert [arm["arm"] for arm in arms] == ["random (mean of 2)", "calibrated on all"]
    assert arms[0]["nll"] == {"x": [2, 3]}


def test_pairs():
    pair = compare_precision.parse_pair("dense/int4@int8")
    assert (pair.hi, pair.lo, pair.rival, pair.share) == ("dense", "int4", "int8", None)
    assert compare_precision.parse_pair("int4/int2@0.5").name == "int4/int2@50%"
    for text in ("dense/int4", "dense/int5@int8", "dense@int8", "int4/int2@1", "int4/int2@x"):
        with pytest.raises(UserError, match="is no pair; give HI/LO@VERSION or HI/LO@SHARE"):
            compare_precision.parse_pair(text)


@pytest.mark.parametrize("text", ["dense/int4@int8", "int8/int2@int4", "int4/int2@0.5"])
@pytest.mark.parametrize("spares", [0, 1, 4])
def test_every_arm_has_the_rivals_bytes(text, spares):
    """Within one per cent, spare cells included, for experts of the size of tri's."""
    pair, total = compare_precision.parse_pair(text), 6 * 32
    comparison = object.__new__(compare_precision.Comparison)
    comparison.engine = SimpleNamespace(
        layers=6, experts=32, format=lambda version: RecordFormat(version, 320, 128, "bfloat16")
    )
    line = comparison._line(pair, "an arm", {}, spares)
    hi, lo = comparison._bytes(pair.hi), comparison._bytes(pair.lo)
    assert line["bytes"] == (line["high"] + spares) * hi + (total - line["high"] + spares) * lo
    budget = line["rival_bytes"] or (hi + lo) * total / 2
    assert abs(line["bytes"] / budget - 1) < 0.01


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    assert compare_precision.main(["draw", str(tmp_path)]) == 2
    assert "run it first" in capsys.readouterr().err
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
