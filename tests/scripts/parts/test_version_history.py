"""Histories of runs with every expert resident; of paged ones in moejax/test_precision_paged.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from host_offload.traces.reader import TransferTrace, read_trace
from scripts.parts.version_history import VersionHistory, version_history
from scripts.precision import plot as plot_versions
from tests.host_offload.traces.traces_of import write_trace

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


@pytest.mark.slow
def test_pictures_show_who_is_absent(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    version = np.random.default_rng(0).integers(-1, 2, (9, 3, 8)).astype(np.int8)
    none = np.zeros(9, np.int64)
    history = VersionHistory(
        *(np.arange(9), none + 4, version, {"promotion": none, "demotion": none}, none, none),
        version_bytes=np.array([100, 30]),
    )
    high, low = (np.sum(version == v, axis=(1, 2)) for v in (0, 1))
    np.testing.assert_array_equal(history.resident_bytes, 100 * high + 30 * low)
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    plot_versions.draw_versions(plt, history, ["dense", "int4"], tmp_path / "versions.png")
    plot_versions.draw_heat(plt, history, ["dense", "int4"], tmp_path / "heat.png")
    assert {file.name for file in tmp_path.iterdir()} == {"versions.png", "heat.png"}
    counts, heat = figures
    areas = counts.axes[0].collections
    assert [area.get_label() for area in areas] == ["dense", "int4", "absent"]
    top = areas[-1].get_paths()[0].vertices[:, 1].max()
    assert top == 24  # all experts: those that are absent are on top of the others
    first = heat.axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(first), version[0] < 0)
    assert "grey: absent" in heat.axes[-1].get_ylabel()
