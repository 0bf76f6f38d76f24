"""Who gets what, and what happens when workers end or hang. Ray is a fake one."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

from moejax import UserError
from moejax.requests.request import GenerationRequest
from moejax.serve.cluster import fleet as fleet_module
from moejax.serve.cluster import workers as workers_module
from moejax.serve.cluster.fleet import Fleet, Generator, Scale, format_fleet, worker_options
from moejax.serve.cluster.ray_cluster import Node
from moejax.serve.cluster.workers import (
    MOST_ENDS,
    MOST_IN_A_ROW,
    MOST_STARTS,
    Started,
    Worker,
    WorkerOptions,
    Workers,
    WorkersEnded,
)
from tests.moejax.serve.cluster.ray_here import RayHere

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

NODES = [Node("a", "1", 4, 0), Node("b", "2", 8, 2)]


class Doubler(Worker):
    """Doubles numbers; a test says otherwise by methods of its own."""

    def __init__(self) -> None:
        self.seen: list[list] = []

    async def start(self) -> Started | str:
        return Started(4, 0.5)

    async def run(self, items):
        self.seen.append([*items])
        async for news in super().run(items):
            yield news

    async def _work(self, item: int) -> int:
        return 2 * item


@pytest.fixture
def run(monkeypatch):
    """Runs work with workers of a kind; returns (results, the workers, what was warned of)."""
    monkeypatch.setattr(workers_module, "BEAT_S", 0.02)
    monkeypatch.setattr(workers_module, "GATHER_S", 0.0)
    monkeypatch.setattr(workers_module, "nodes", lambda: NODES)

    def go(kind: type[Worker], work, count: int = 2, on: tuple[Node, ...] = ()):
        ray = RayHere()
        monkeypatch.setattr(workers_module, "require_ray", lambda: ray)
        said: list[str] = []
        try:
            with Workers(WorkerOptions(kind, (), count, 1, 0, on), said.append) as workers:
                results = list(workers.run(work))
        finally:
            assert all(handle.killed for handle in ray.handles)
        return results, ray.handles, said

    return go


def test_each_piece_of_work_has_one_result(run):
    results, handles, said = run(Doubler, range(50))
    assert sorted(results) == [(i, 2 * i) for i in range(50)] and not said
    assert [sum(map(len, handle.worker.seen)) > 5 for handle in handles] == [True, True]


def test_what_is_wrong_with_one_piece_is_its_result(run):
    class Picky(Doubler):
        async def _work(self, item):
            if item == 3:
                raise UserError("not 3")
            return item

    found = dict(run(Picky, range(6))[0])
    assert str(found.pop(3)) == "not 3" and found == {i: i for i in (0, 1, 2, 4, 5)}


def test_poison_ends_one_worker_in_company_and_then_alone(run):
    class Poisoned(Doubler):
        async def _work(self, item):
            if item == 5:
                raise RuntimeError("a step failed")
            return item

    results, handles, said = run(Poisoned, range(20))
    found = dict(results)
    assert len(results) == 20 and isinstance(error := found.pop(5), WorkersEnded)
    assert f"{MOST_ENDS} workers ended while this ran" in str(error)
    assert found == {i: i for i in range(20) if i != 5}
    met = [batch for handle in handles for batch in handle.worker.seen if 5 in batch]
    assert len(met) == MOST_ENDS and sorted(map(len, met)) == [1, 1, 4]
    assert "a step failed" in said[0]


def test_what_was_yielded_is_not_done_again(run):
    class Ending(Doubler):
        ended = False

        async def run(self, items):
            self.seen.append([*items])
            for place, item in enumerate(items):
                if item == 2 and not Ending.ended:
                    Ending.ended = True
                    raise RuntimeError("killed")
                yield [(place, "a part", False), (place, item, True)]

    results, handles, said = run(Ending, range(4), count=1)
    assert [value for _, value in results if value != "a part"] == [0, 1, 2, 3]
    assert len(results) == 8 and len(said) == 1
    assert [handle.worker.seen for handle in handles] == [[[0, 1, 2, 3]], [[2], [3]]]


def test_a_worker_that_cannot_start_is_left_out(run):
    class Missing(Doubler):
        made = 0

        async def start(self):
            Missing.made += 1
            return "/models/x: no such directory" if Missing.made % 2 else await super().start()

    results, handles, said = run(Missing, range(10))
    assert len(results) == 10 and "could not start: /models/x: no such directory" in said[0]
    assert not handles[0].worker.seen and len(handles) == 2

    class Nowhere(Doubler):
        async def start(self):
            return "no model"

    with pytest.raises(UserError, match=r"worker 1 .*no model\nworker 2 .*no model"):
        run(Nowhere, [1])


def test_a_worker_that_is_killed_while_it_starts_is_started_again(run):
    class Killed(Doubler):
        left = MOST_STARTS - 1

        async def start(self):
            Killed.left -= 1
            if Killed.left >= 0:
                raise RuntimeError("The actor died unexpectedly.")
            return await super().start()

    results, _, said = run(Killed, range(6), count=1)
    assert sorted(results) == [(i, 2 * i) for i in range(6)] and len(said) == MOST_STARTS - 1
    Killed.left = MOST_STARTS
    with pytest.raises(UserError, match=f"worker {MOST_STARTS} .*could not start: .*died"):
        run(Killed, [1], count=1)


def test_workers_that_only_end_end_all(run):
    class Broken(Doubler):
        async def _work(self, item):
            raise RuntimeError("no")

    with pytest.raises(UserError, match=f"{MOST_IN_A_ROW} workers ended one after the other"):
        run(Broken, range(50), count=4)


@pytest.mark.parametrize("what", ["silent", "still", "no place"])
def test_a_worker_that_hangs_is_named_and_ended(run, monkeypatch, what):
    limit = {"silent": "ANSWER_S", "still": "MOVE_S", "no place": "PLACE_S"}[what]
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
            if self.hangs and (what == "no place" or (what == "silent" and self.beats > 2)):
                await asyncio.sleep(1e6)
            return await super().beat(seconds)

        async def start(self):
            if what == "no place" and self.hangs:
                await asyncio.sleep(1e6)
            return await super().start()

        async def _work(self, item):
            if self.hangs:
                await asyncio.sleep(1e6)
            return item

    def slowly():
        for item in range(6):
            time.sleep(0.2)
            yield item

    results, _, said = run(Hanging, slowly() if what == "no place" else range(6))
    assert sorted(results) == [(i, i) for i in range(6)]
    expected = (
        {
            "silent": "worker 1 (process .* on .*) ended: it does not answer for",
            "still": "worker 1 (process .* on .*) ended: it answers, but its work has not moved",
            "no place": "worker 1 could not start: Ray found no room of 1 CPUs and 0 GPUs",
        }[what]
        .replace("(", r"\(")
        .replace(")", r"\)")
    )
    assert len(said) == 1 and re.match(expected, said[0])


def test_workers_with_nodes_of_their_own(run):
    _, handles, _ = run(Doubler, range(9), on=tuple(NODES))
    asked = [(one.options["scheduling_strategy"], one.options["num_cpus"]) for one in handles]
    assert asked == [("a", 4), ("b", 8)]


def test_turns_of_a_session_are_one_piece_of_work(monkeypatch):
    monkeypatch.setattr(fleet_module, "nodes", lambda: NODES)
    ran = []

    def each(work, pack):
        for item in work:
            ran.append([asked.prompt for asked in item])
            assert all(asked.tag is None for asked in pack(item))
            yield item, UserError("no") if len(item) == 1 else [*ran[-1]]

    fake = SimpleNamespace(run=each, tokens=0)
    monkeypatch.setattr(fleet_module, "Workers", lambda asked, warn: fake)
    turns = [("a", "s"), ("b", None), ("c", "s"), ("d", "t")]
    requests = [GenerationRequest(p, session_id=s, tag=i) for i, (p, s) in enumerate(turns)]
    fleet = Fleet("demo", {"device": "cpu"}, Scale(), {"s": 2, "t": 3})
    found = [(asked.tag, output) for asked, output in fleet.generate_each(requests)]
    assert ran == [["b"], ["a", "c"], ["d"]]  # the third turn of t never came
    assert found[1:3] == [(0, "a"), (2, "c")] and isinstance(found[0][1], UserError)


def test_workers_of_a_cluster(monkeypatch):
    def asked(nodes, options=None, **scale):
        monkeypatch.setattr("moejax.serve.cluster.fleet.nodes", lambda: nodes)
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
