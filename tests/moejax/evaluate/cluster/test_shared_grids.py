"""How a grid is shared out, and what a worker refuses; serve/cluster/test_with_workers.py runs one.

Killed at random on a real Ray: `python -m scripts.check scale_out --only grid`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moejax import UserError
from moejax.evaluate.cluster import grids
from moejax.evaluate.cluster.grids import GridWorker
from moejax.evaluate.experiments.definition import read_experiment
from moejax.serve.cluster.fleet import Scale
from moejax.serve.cluster.ray_cluster import Node

pytestmark = pytest.mark.slow

GRID = {
    "policies": ["lru", "random"],
    "budgets": ["20%"],
    "texts": ["math"],
    "prompt_tokens": 70,
    "output_tokens": 8,
    "batch": [2],
    "repeats": 2,
    "modes": ["measured", "simulated"],
}


def parts_of(monkeypatch, nodes, definition=None, **scale):
    """(parts of a grid on a cluster of these nodes, the driver's view of the grid)."""
    monkeypatch.setattr(grids, "nodes", lambda: nodes)
    experiment = read_experiment(definition or GRID)
    none = type("File", (), {"lines": ()})
    files = grids.Files(none, none, none, none)
    driver = grids._ClusterGrid(experiment, files, Scale(**scale), print)
    return list(driver._parts(grids.runs_of(experiment))), driver


def test_what_is_measured_has_a_node_and_what_is_counted_is_shared_out(monkeypatch):
    cpus = [Node("a", "1", 8, 0), Node("b", "2", 4, 0), Node("head", "3", 0, 0)]
    definition = {**GRID, "batch": [1, 2], "budgets": ["20%", "40%"]}
    parts, driver = parts_of(monkeypatch, cpus, definition)
    measured = [part for part in parts if part.measured]
    assert [len(part.runs) for part in measured] == [8, 8]  # an engine's repeats stay together
    assert all(len({cell.batch for cell, _ in part.runs}) == 1 for part in measured)
    assert [len(part.runs) for part in parts if not part.measured] == [2, 2, 2, 2]
    bounds = [bound for part in parts for bound in part.bounds]
    assert len(bounds) == len(set(bounds)) == 4
    assert all(part.quality is None for part in parts[1:]) and parts[0].quality == []
    asked = driver._workers(True, 9)
    assert asked.on == tuple(cpus[:2]) and asked.count == 2 and asked.gpus == 0
    assert not driver._workers(False, 9).on
    parts, driver = parts_of(monkeypatch, cpus, workers=8, cores_per_worker=2)
    assert driver._workers(True, 1).count == 1 and driver._workers(False, 99).cpus == 2
    gpus = [Node("a", "1", 64, 8), Node("b", "2", 64, 0)]
    assert parts_of(monkeypatch, gpus)[1]._workers(True, 9).count == 1
    assert parts_of(monkeypatch, gpus)[1]._workers(True, 9).gpus == 1


def test_one_measurement_at_a_time_on_a_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(grids.tempfile, "gettempdir", lambda: str(tmp_path))
    entered = threading.Event()

    def second():
        with grids._alone_here():
            entered.set()

    thread = threading.Thread(target=second)
    with grids._alone_here():
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()


def test_another_file_on_a_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("The old house by the river was empty. " * 200)
    asked = grids._with_whole_paths(read_experiment({**GRID, "texts": ["t.txt"]}))
    Path("t.txt").write_text("Another. " * 400)
    with pytest.raises(UserError, match="t is another file here than where"):
        GridWorker()._read(dict(asked), str(tmp_path))
    Path("t.txt").unlink()
    with pytest.raises(UserError, match=r"t\.txt"):
        GridWorker()._read(dict(asked), str(tmp_path))
