"""Grids on a real Ray on this machine. MOEJAX_RAY names one that runs already.

Killed at random: `python -m scripts.check scale_out --only grid`."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import moejax
from moejax import UserError
from moejax.evaluate.cluster import grids
from moejax.evaluate.cluster.grids import GridWorker, cluster_ablate
from moejax.evaluate.experiments.definition import read_experiment
from moejax.serve.cluster.fleet import Scale
from moejax.serve.cluster.ray_cluster import LOCAL, Node, connected
from tests.moejax.evaluate.experiments.test_grid import equal_part

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

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


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray", reason="needs Ray")
    with connected(os.environ.get("MOEJAX_RAY", LOCAL), 2):
        yield os.environ.get("MOEJAX_RAY", LOCAL)


@pytest.mark.nightly  # test_with_workers.py has the records, test_pool.py the ends
def test_the_records_of_one_process_though_worker_and_driver_end(ray, tmp_path, monkeypatch):
    # Runs that take longer than a worker gathers news, so that what it is at is not done yet.
    grid = {**GRID, "output_tokens": 250}
    one = moejax.ablate(grid, tmp_path / "one", progress=False)
    take, taken, said = grids._ClusterGrid._take, [], []

    def disturbed(self, part, piece, advance):
        take(self, part, piece, advance)
        taken.append(piece)
        records = [each for each in taken if each.file == "records"]
        if len(records) == 2 and piece is records[1]:
            (pool,) = pools
            os.kill(next(m.place.pid for m in pool._members if m.has), signal.SIGKILL)
        if len(records) == 4 and piece is records[3]:
            raise KeyboardInterrupt

    pools, init = [], grids.Pool.__init__
    monkeypatch.setattr(grids.Pool, "__init__", lambda s, *a: pools.append(s) or init(s, *a))
    monkeypatch.setattr(grids._ClusterGrid, "_take", disturbed)
    asked = dict(progress=False, warn=said.append)
    with pytest.raises(KeyboardInterrupt):
        cluster_ablate(grid, tmp_path / "many", Scale(ray, 2, 1), **asked)
    before = (tmp_path / "many" / "records.jsonl").read_bytes()
    assert len(before.splitlines()) == 4 and any("run again" in text for text in said)
    many = cluster_ablate(grid, tmp_path / "many", Scale(ray, 2, 1), **asked)
    assert (tmp_path / "many" / "records.jsonl").read_bytes().startswith(before)
    found, wanted = (sorted(map(repr, equal_part(each.rows))) for each in (many, one))
    assert found == wanted
    sessions = [line["session"] for line in many.sessions]
    assert sessions == list(range(len(sessions)))
    assert {row["session"] for row in many.rows} <= {None, *sessions}
    # Where one goes on, the other does: nothing is left to do.
    assert moejax.ablate(grid, tmp_path / "many", progress=False).rows == many.rows


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
    assert asked.whole_nodes and asked.count == 2 and asked.gpus == 0
    assert not driver._workers(False, 9).whole_nodes
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
        GridWorker()._read({"asked": asked, "home": str(tmp_path)})
    Path("t.txt").unlink()
    with pytest.raises(UserError, match=r"t\.txt"):
        GridWorker()._read({"asked": asked, "home": str(tmp_path)})
