"""How a grid is shared out, and what a worker refuses; serve/cluster/test_with_workers.py runs one.

Killed at random on a real Ray: `python -m scripts.check scale_out --only grid`."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from moejax import UserError
from moejax.evaluate.cluster import grids
from moejax.evaluate.cluster.grids import GridWorker
from moejax.evaluate.experiments.definition import read_experiment
from moejax.evaluate.experiments.grid import key_of
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


def runs_of_share(experiment, number, count, measured, done=frozenset()):
    """Groups with the runs that a worker does of a share."""
    worker, found = GridWorker(), {}
    worker._experiment = worker._learned = experiment
    worker._scratch = SimpleNamespace(name="nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "run_groups", lambda _, groups, *others: found.update(groups))
        worker._run(grids._Share(number, count, measured, set(done)), print)
    return found


def test_shares_are_all_runs_once_and_an_engine_measures_its_own():
    experiment = read_experiment({**GRID, "batch": [1, 2], "budgets": ["20%", "40%"]})
    every = [key_of(run) for runs in experiment.runs().values() for run in runs]
    shares = [runs_of_share(experiment, i, 2, m) for m in (True, False) for i in range(2)]
    runs = [run for share in shares for runs in share.values() for run in runs]
    assert sorted(map(repr, map(key_of, runs))) == sorted(map(repr, every))
    assert [[cell.batch for cell, _ in runs] for s in shares[:2] for runs in s.values()] == [
        [1] * 8,
        [2] * 8,
    ]
    counted = [len(runs) for share in shares[2:] for runs in share.values()]
    assert counted == [3, 3, 3, 3]  # two policies and MIN at two budgets and batches
    # What has come is left out.
    assert not runs_of_share(experiment, 0, 2, True, every)


def test_what_is_measured_has_a_node_for_itself(monkeypatch):
    experiment = read_experiment(GRID)
    cpus = [Node("a", "1", 8, 0), Node("b", "2", 4, 0), Node("head", "3", 0, 0)]
    monkeypatch.setattr(grids, "nodes", lambda: cpus)
    asked = grids._workers(experiment, Scale(workers=8, cores_per_worker=2), True)
    assert asked.on == tuple(cpus[:2]) and asked.count == 2 and asked.gpus == 0
    asked = grids._workers(experiment, Scale(workers=8, cores_per_worker=2), False)
    assert not asked.on and (asked.count, asked.cpus) == (8, 2)
    monkeypatch.setattr(grids, "nodes", lambda: [Node("a", "1", 64, 8), Node("b", "2", 64, 0)])
    asked = grids._workers(experiment, Scale(), True)
    assert (asked.count, asked.gpus) == (1, 1)


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
