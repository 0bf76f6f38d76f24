"""Who gets what, and what happens when workers end or hang. Ray is a fake one."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

import moejax.ray
from moejax import UserError
from moejax.requests.request import GenerationRequest
from moejax.serve.batch.job import Job
from moejax.serve.cluster import fleet as fleet_module
from moejax.serve.cluster import workers as workers_module
from moejax.serve.cluster.fleet import Fleet, Generator, format_fleet
from moejax.serve.cluster.ray_cluster import Node
from moejax.serve.cluster.workers import (
    MOST_ENDS,
    MOST_IN_A_ROW,
    Scale,
    Started,
    Worker,
    WorkerOptions,
    Workers,
    WorkersEnded,
    worker_options,
)
from tests.moejax.serve.cluster.ray_here import RayHere

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

NODES = [Node("a", "1", 4, 0), Node("b", "2", 8, 2)]


class Doubler(Worker):
    """Doubles numbers, without a model; a test says otherwise by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    async def start(self) -> Started | str:
        return Started(4, 0.5)

    def _begin(self, llm) -> int:
        raise AssertionError("there is no model")

    def _moves(self) -> float:
        return time.monotonic()

    async def run(self, piece):
        self.seen.append(piece)
        return await super().run(piece)

    async def _work(self, piece: int) -> int:
        return 2 * piece


@pytest.fixture
def run(monkeypatch):
    """Runs work with workers of a kind; returns (results, the workers, what was warned of)."""
    monkeypatch.setattr(workers_module, "BEAT_S", 0.02)
    monkeypatch.setattr(workers_module, "GATHER_S", 0.0)
    monkeypatch.setattr(workers_module, "nodes", lambda: NODES)

    def go(kind: type[Worker], work, count: int = 2):
        ray = RayHere()
        monkeypatch.setattr(workers_module, "require_ray", lambda: ray)
        said: list[str] = []
        try:
            with Workers(WorkerOptions(kind, (), count, 1, 0), said.append) as workers:
                results = list(workers.run(work))
        finally:
            assert all(handle.killed for handle in ray.handles)
        return results, ray.handles, said

    return go


def test_each_piece_of_work_has_one_result(run):
    results, handles, said = run(Doubler, range(50))
    assert sorted(results) == [(i, 2 * i) for i in range(50)] and not said
    assert [len(handle.worker.seen) > 5 for handle in handles] == [True, True]


def test_what_is_wrong_with_one_piece_is_its_result(run):
    class Picky(Doubler):
        async def _work(self, piece):
            if piece == 3:
                raise UserError("not 3")
            return piece

    found = dict(run(Picky, range(6))[0])
    assert str(found.pop(3)) == "not 3" and found == {i: i for i in (0, 1, 2, 4, 5)}


def test_poison_ends_one_worker_in_company_and_then_alone(run):
    class Poisoned(Doubler):
        async def _work(self, piece):
            if piece == 5:
                raise RuntimeError("a step failed")
            return piece

    results, handles, said = run(Poisoned, range(20))
    found = dict(results)
    assert len(results) == 20 and isinstance(error := found.pop(5), WorkersEnded)
    assert f"{MOST_ENDS} workers ended while this ran" in str(error)
    assert found == {i: i for i in range(20) if i != 5}
    met = [handle.worker.seen for handle in handles if 5 in handle.worker.seen]
    assert len(met) == MOST_ENDS and "a step failed" in said[0]
    assert all("run again: 1" in text for text in said[1:])  # alone


def test_a_result_that_arrived_is_not_computed_again(run):
    class Ending(Doubler):
        ended = False

        async def _work(self, piece):
            await asyncio.sleep(0.2 * (piece > 1))  # later than the results of 0 and 1
            if piece == 2 and not Ending.ended:
                Ending.ended = True
                raise RuntimeError("killed")
            return piece

    results, handles, said = run(Ending, range(3), count=1)
    assert results == [(i, i) for i in range(3)] and len(said) == 1
    assert [handle.worker.seen for handle in handles] == [[0, 1, 2], [2]]


@pytest.mark.parametrize(
    ("what", "said"), [("weights", "has other weights"), ("chosen", "chose other ops than other")]
)
def test_a_worker_with_other_weights_or_ops_ends_the_job(run, what, said):
    class Other(Doubler):
        async def start(self):
            return Started(4, 0.5, **{what: {"ops": {"linear": str(id(self))}}})

    with pytest.raises(UserError, match=rf"worker 2 .*{said}"):
        run(Other, range(3))


def test_a_worker_of_a_dataset_with_other_ops_ends_it(monkeypatch):
    model = SimpleNamespace(chosen={"ops": {"linear": "pallas"}})
    monkeypatch.setattr(moejax.ray, "LLM", lambda *given, **options: model)
    monkeypatch.setattr(moejax.ray, "require_ray", lambda: SimpleNamespace(get=lambda it: it))
    kept = moejax.ray.FirstChoice()
    first = SimpleNamespace(is_chosen=SimpleNamespace(remote=kept.is_chosen))
    job = Job("rows", "rows")
    for _ in range(2):
        moejax.ray.Rows(job, {}, first)
    model.chosen = {"ops": {"linear": "xla"}}
    with pytest.raises(UserError, match="chose other ops than other workers, "):
        moejax.ray.Rows(job, {}, first)


@pytest.mark.parametrize("before", [{}, {"weights": "theirs"}, {"weights": "of before"}])
def test_workers_alone_have_the_checkpoint(before, monkeypatch):
    """Then results are bound to what theirs is."""

    class There(Doubler):
        async def start(self, model, options):
            return Started(4, 0.5, weights="theirs", chosen={"ops": {"linear": "xla"}})

        async def _work(self, piece):
            return UserError("no")

    monkeypatch.setattr(fleet_module, "Generator", There)
    monkeypatch.setattr(workers_module, "require_ray", RayHere)
    monkeypatch.setattr(workers_module, "nodes", lambda: NODES)
    chosen, options = dict(before), {"device": "cpu"}
    with Fleet("/not/here", options, Scale(), {}, chosen=chosen) as fleet:
        results = fleet.generate_each(iter([GenerationRequest("a")]))
        if chosen.get("weights") == "of before":
            with pytest.raises(UserError, match="or the results so far"):
                next(results)
        else:
            next(results)
            assert chosen == {"weights": "theirs", "ops": {"linear": "xla"}}


def test_a_worker_that_cannot_start_ends_the_job(run):
    class Missing(Doubler):
        async def start(self):
            return "/models/x: no such directory"

    with pytest.raises(
        UserError, match=r"worker 1 .*could not start: /models/x: no such directory"
    ):
        run(Missing, range(10))


def test_a_worker_that_is_killed_while_it_starts_is_started_again(run):
    class Killed(Doubler):
        left = MOST_IN_A_ROW - 1

        async def start(self):
            Killed.left -= 1
            if Killed.left >= 0:
                raise RuntimeError("The actor died unexpectedly.")
            return await super().start()

    results, _, said = run(Killed, range(6), count=1)
    assert sorted(results) == [(i, 2 * i) for i in range(6)] and len(said) == MOST_IN_A_ROW - 1
    Killed.left = MOST_IN_A_ROW
    with pytest.raises(UserError, match=f"{MOST_IN_A_ROW} workers ended .*died"):
        run(Killed, [1], count=1)


def test_workers_that_only_end_end_all(run):
    class Broken(Doubler):
        async def _work(self, piece):
            raise RuntimeError("no")

    with pytest.raises(UserError, match=f"{MOST_IN_A_ROW} workers ended one after the other"):
        run(Broken, range(50), count=4)


HANGS = {
    "silent": ("ANSWER_S", "does not answer for"),
    "still": ("MOVE_S", "answers, but its work has not moved for"),
    "starting": ("START_S", "answers, but has not started within"),
}


@pytest.mark.parametrize("what", HANGS)
def test_a_worker_that_hangs_is_named_and_ended(run, monkeypatch, what):
    limit, why = HANGS[what]
    monkeypatch.setattr(workers_module, limit, 0.3)

    class Hanging(Doubler):
        made = 0

        def __init__(self):
            super().__init__()
            Hanging.made += 1
            self.hangs, self.beats = Hanging.made == 1, 0

        def _moves(self):
            return 0.0 if self.hangs else time.monotonic()

        async def beat(self, seconds):
            self.beats += 1
            if self.hangs and what == "silent" and self.beats > 2:
                await asyncio.sleep(1e6)
            return await super().beat(seconds)

        async def start(self):
            if self.hangs and what == "starting":
                await asyncio.sleep(1e6)
            return await super().start()

        async def _work(self, piece):
            if self.hangs:
                await asyncio.sleep(1e6)
            return piece

    results, _, said = run(Hanging, range(6), count=1 if what == "starting" else 2)
    assert sorted(results) == [(i, i) for i in range(6)]
    assert len(said) == 1 and re.match(rf"worker 1 \(process .*\) ended: it {why}", said[0])


def test_a_cluster_without_room(run, monkeypatch):
    monkeypatch.setattr(workers_module, "PLACE_S", 0.3)

    class Nowhere(Doubler):
        async def beat(self, seconds):
            await asyncio.sleep(1e6)

        async def start(self):
            await asyncio.sleep(1e6)

    with pytest.raises(UserError, match="no room for a worker of 1 CPUs and 0 GPUs"):
        run(Nowhere, range(6))

    class Late(Doubler):
        ended = False

        async def _work(self, piece):
            await asyncio.sleep(0.4)  # longer than a place may take
            if not Late.ended:
                Late.ended = True
                raise RuntimeError("killed")
            return piece

    assert run(Late, [7], count=1)[0] == [(7, 7)]  # the next worker has its own time


def test_turns_of_a_session_are_one_piece_of_work(monkeypatch):
    monkeypatch.setattr(workers_module, "nodes", lambda: NODES)
    ran = []

    def each(work, pack):
        for item in work:
            ran.append([asked.prompt for asked in item])
            assert all(asked.tag is None for asked in pack(item))
            yield item, UserError("no") if len(item) == 1 else [*ran[-1]]

    fake = SimpleNamespace(run=each, tokens=0, chosen=None)
    monkeypatch.setattr(fleet_module, "Workers", lambda asked, warn: fake)
    turns = [("a", "s"), ("b", None), ("c", "s"), ("d", "t")]
    requests = [GenerationRequest(p, session_id=s, tag=i) for i, (p, s) in enumerate(turns)]
    chosen = {}
    fleet = Fleet("demo", {"device": "cpu"}, Scale(), {"s": 2, "t": 3}, chosen=chosen)
    found = [(asked.tag, output) for asked, output in fleet.generate_each(requests)]
    assert not chosen  # this machine has the checkpoint, which the job's options name
    assert ran == [["b"], ["a", "c"], ["d"]]  # the third turn of t never came
    assert found[1:3] == [(0, "a"), (2, "c")] and isinstance(found[0][1], UserError)


def test_workers_of_a_cluster(monkeypatch):
    def asked(nodes, options=None, **scale):
        monkeypatch.setattr("moejax.serve.cluster.workers.nodes", lambda: nodes)
        return worker_options(Generator, "demo", options or {}, Scale(**scale))

    cpus = [Node("a", "1", 8, 0), Node("b", "2", 8, 0)]
    found = asked(cpus)
    assert (found.count, found.cpus, found.gpus, found.arguments[1]["threads"]) == (2, 8, 0, 8)
    assert (asked(cpus, workers=4).cpus, asked(cpus, workers=3).cpus) == (4, 4)
    gpus = [Node("a", "1", 64, 8), Node("b", "2", 64, 8), Node("head", "3", 4, 0)]
    found = asked(gpus)
    assert (found.count, found.cpus, found.gpus) == (16, 8, 1)
    assert "threads" not in found.arguments[1]
    assert asked(gpus, {"device": "cpu"}).gpus == 0
    with pytest.raises(UserError, match="16 cores, and no node of the cluster has more than 8"):
        asked(cpus, cores_per_worker=16)
    with pytest.raises(UserError, match="workers must be at least 1"):
        asked(cpus, workers=0)
    with pytest.raises(UserError, match="driver"):
        asked(cpus, {"driver": "x"})


def test_the_table_of_workers():
    stats = {
        "generated_tokens": 100,
        "tokens_per_s": None,
        "experts": {"hit_rate": 0.85},
        "bytes": {"fill": 1 << 20, "read_through": 1 << 20},
    }
    worker = dict(worker=1, host="here", pid=1, results=2, start_s=1.0, stats=stats)
    header, row, last = format_fleet({"workers": [worker], "ended_workers": 1}).splitlines()
    assert row.split() == ["1", "2", "0.0", "85.0%", "2", "MiB", "1.00", "s", "here"]
    assert len(header) == len(row) and last == "all: 100 tokens of 1 workers, 1 ended before"
