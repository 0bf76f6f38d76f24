"""How a grid is shared out, and what a worker refuses; serve/cluster/test_with_workers.py runs one.

Killed at random on a real Ray: `python -m scripts.check scale_out --only grid`."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from moejax import UserError
from moejax.evaluate.cluster import grids
from moejax.evaluate.cluster.grids import Part, run_part
from moejax.evaluate.experiments.definition import read_experiment
from moejax.evaluate.experiments.grid import key_of
from moejax.serve.cluster.ray_cluster import Node
from moejax.serve.cluster.workers import Scale
from tests.moejax.serve.cluster.ray_here import RayError, RayHere, RayTaskError, Stream

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


def runs_of_part(asked, number, count, measured, done=()):
    """Groups with the runs that a task does of a part."""
    found, part = {}, Part(number, count, measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "run_groups", lambda _, groups, *others: found.update(groups))
        patch.setattr(grids, "_measure_alone", contextlib.nullcontext)
        assert {name for name, _ in run_part(asked, ".", part, set(done))} == {grids.BEAT}
    return found


def test_parts_are_all_runs_once_and_an_engine_measures_its_own():
    experiment = read_experiment({**GRID, "batch": [1, 2], "budgets": ["20%", "40%"]})
    asked = experiment.asked
    every = [key_of(run) for runs in experiment.runs().values() for run in runs]
    shares = [runs_of_part(asked, i, 2, m) for m in (True, False) for i in range(2)]
    runs = [run for share in shares for runs in share.values() for run in runs]
    assert sorted(map(repr, map(key_of, runs))) == sorted(map(repr, every))
    assert [[cell.batch for cell, _ in runs] for s in shares[:2] for runs in s.values()] == [
        [1] * 8,
        [2] * 8,
    ]
    counted = [len(runs) for share in shares[2:] for runs in share.values()]
    assert counted == [3, 3, 3, 3]  # two policies and MIN at two budgets and batches
    # What has come is left out.
    assert not runs_of_part(asked, 0, 2, True, every)


def test_what_is_measured_has_a_node_for_itself(monkeypatch):
    monkeypatch.setattr(grids, "require_ray", RayHere)
    experiment, scale = read_experiment(GRID), Scale(workers=8, cores_per_worker=2)

    def asked(nodes, number, measured):
        monkeypatch.setattr(grids, "nodes", lambda: nodes)
        found = grids.task_options(Part(number, 2, measured), experiment, scale)
        return found["scheduling_strategy"], found["num_cpus"], found["num_gpus"]

    cpus = [Node("a", "1", 8, 0), Node("b", "2", 4, 0), Node("head", "3", 0, 0)]
    assert [asked(cpus, i, True) for i in range(2)] == [("a", 8, 0), ("b", 4, 0)]
    assert asked(cpus, 7, False) == ("SPREAD", 2, 0)
    gpus = [Node("a", "1", 64, 8), Node("b", "2", 64, 0)]
    assert asked(gpus, 0, True) == ("a", 64, 8) and asked(gpus, 5, False) == ("SPREAD", 2, 1)
    assert [node.id for node in grids.useful_nodes(experiment)] == ["a"]


def test_one_measurement_at_a_time_on_a_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(grids.tempfile, "gettempdir", lambda: str(tmp_path))
    entered = threading.Event()

    def second():
        with grids._measure_alone():
            entered.set()

    thread = threading.Thread(target=second)
    with grids._measure_alone():
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
        list(run_part(asked, str(tmp_path), Part(0, 1, False), set()))
    Path("t.txt").unlink()
    with pytest.raises(UserError, match=r"t\.txt"):
        list(run_part(asked, str(tmp_path), Part(0, 1, False), set()))


@pytest.fixture
def ray(monkeypatch):
    here = RayHere()
    monkeypatch.setattr(grids, "require_ray", lambda: here)
    monkeypatch.setattr(grids, "BEAT_S", 0.05)
    return here


PLACE = {"pid": 7, "host": "a"}


def test_a_run_that_ends_tasks_is_an_error_and_others_go_on(ray):
    left, starts = ["1", "bad", "2"], []

    def lines(number):
        yield grids.BEAT, PLACE
        yield "sessions.jsonl", {"session": number}
        for run in [*left]:
            yield grids.BEGUN, {"run": run, "session": number}
            if run == "bad":
                raise RayError("the worker was killed")
            yield "records.jsonl", {"run": run, "session": number}

    def start(part):
        starts.append(part)
        return Stream(ray, lines(len(starts)))

    records, sessions = [], []
    for name, line in grids._lines_of([Part(0, 1, True)], start):
        (records if name == "records.jsonl" else sessions).append(line)
        if name == "records.jsonl":
            left.remove(line["run"])
    assert [line["run"] for line in records] == ["1", "bad", "2"] and len(starts) == 4
    assert "3 tasks ended while this ran: RayError: the worker" in records[1]["error"]
    assert {line["session"] for line in records} <= {line["session"] for line in sessions}


@pytest.mark.parametrize(("error", "count"), [(RayError("killed"), 3), (RayTaskError("no GPU"), 1)])
def test_tasks_that_end_before_a_run(ray, error, count):
    starts = []

    def lines():
        yield grids.BEAT, PLACE
        raise error

    def start(part):
        starts.append(part)
        return Stream(ray, lines())

    ray.get = lambda reference: reference.result()
    with pytest.raises(UserError, match=r"tasks of the grid ended: .*; the same command"):
        list(grids._lines_of([Part(0, 1, True)], start))
    assert len(starts) == count


@pytest.mark.parametrize(
    ("deadline", "says"),
    [
        ("ANSWER_S", r"hangs: process 7 on a does not answer for 0 s; end it"),
        ("PLACE_S", "Ray found no room"),
        ("SILENT_S", "no run of the grid ended within 0 s: process 7 on a hangs"),
    ],
)
def test_deadlines(ray, monkeypatch, deadline, says):
    ends = threading.Event()

    def lines():
        while deadline == "SILENT_S":
            yield grids.BEAT, PLACE
        if deadline == "ANSWER_S":
            yield grids.BEAT, PLACE
        ends.wait(30)

    monkeypatch.setattr(grids, deadline, 0.2)
    with pytest.raises(UserError, match=says):
        list(grids._lines_of([Part(0, 1, True)], lambda part: Stream(ray, lines())))
    ends.set()


def test_a_task_says_where_it_is_while_a_run_goes_on(monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr(grids, "BEAT_S", 0.01)
    monkeypatch.setattr(grids, "_run", lambda *given: ends.wait(30))
    lines = run_part({}, ".", Part(0, 1, True), set())
    assert [next(lines) for _ in range(3)] == [(grids.BEAT, grids._place())] * 3
    ends.set()
    assert all(name == grids.BEAT for name, _ in lines)
