"""Who gets what, and what happens when workers and nodes end. Ray is a fake one."""

from __future__ import annotations

import pytest

from moejax import UserError
from moejax.serve.cluster import pool as pool_module
from moejax.serve.cluster.fleet import Scale, merged, worker_options
from moejax.serve.cluster.pool import MOST_IN_A_ROW, MOST_STARTS, Pool, Task, WorkerOptions
from moejax.serve.cluster.ray_cluster import Node
from moejax.serve.cluster.worker import Generator, Outcome
from tests.moejax.serve.cluster.fake_ray import Actor, Die, FakeRay, RayError

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


@pytest.fixture
def run(monkeypatch):
    """Runs tasks with a fake Ray; returns (results, the pool, what was warned of)."""

    def go(ray: FakeRay, tasks, workers: int = 2, whole_nodes: bool = False):
        monkeypatch.setattr(pool_module, "require_ray", lambda: ray)
        monkeypatch.setattr(pool_module, "nodes", lambda: list(ray.alive))
        said: list[str] = []
        asked = WorkerOptions(Generator, "demo", {}, workers, 1, whole_nodes=whole_nodes)
        with Pool(asked, said.append) as pool:
            results = [(task.payload, result) for task, result in pool.run(tasks)]
        assert all(actor.dead for actor in ray.actors)
        assert any(actor.closed for actor in ray.actors)
        return results, pool, said

    return go


def double(actor: Actor, payload: int) -> int:
    return 2 * payload


def test_each_task_has_one_result(run):
    ray = FakeRay(double)
    results, _, said = run(ray, [Task(i) for i in range(50)])
    assert sorted(results) == [(i, 2 * i) for i in range(50)] and not said
    assert all(len(actor.seen) >= 10 for actor in ray.actors)


def test_poison_ends_one_worker_in_company_and_one_alone(run):
    ends = []

    def work(actor, payload):
        if payload == 5:
            ends.append(len(actor.inbox))
            raise Die
        return payload

    results, pool, _ = run(FakeRay(work), [Task(i) for i in range(20)])
    found = dict(results)
    assert len(results) == 20
    assert isinstance(error := found.pop(5), UserError) and "workers ended while this ran" in str(
        error
    )
    assert found == {i: i for i in range(20) if i != 5}
    assert len(ends) == 2 and ends[1] == 1 and pool.ended == 2


def test_a_broken_engine_is_a_dead_worker(run):
    def work(actor, payload):
        return Outcome(0, broken="a step failed") if actor.number == 1 else payload

    results, pool, said = run(FakeRay(work), [Task(i) for i in range(12)])
    assert sorted(results) == [(i, i) for i in range(12)]
    assert pool.ended == 1 and "a step failed" in said[0]


def test_a_node_s_end_makes_no_suspects(run):
    ray, seen, together = FakeRay(double, nodes=2), set(), []

    def work(actor, payload):
        if payload == 9 and len(ray.alive) == 2:
            ray.alive = [node for node in ray.alive if node.id != actor.node]
            seen.update(number for number, _ in actor.inbox)
            raise Die
        if len(ray.alive) == 1 and payload == 9:
            together.append(len(actor.inbox))
        return 2 * payload

    ray.work = work
    results, _, _ = run(ray, [Task(i) for i in range(30)], workers=4)
    assert sorted(results) == [(i, 2 * i) for i in range(30)]
    assert together[0] > 1  # not alone


def test_a_node_without_the_model_is_left_out(run):
    ray = FakeRay(double, nodes=2)
    ray.start = lambda actor: "/models/x: no such directory" if actor.node == "n1" else None
    results, _, said = run(ray, [Task(i) for i in range(10)])
    assert len(results) == 10 and "n1" in said[0] and "no such directory" in said[0]
    assert {actor.node for actor in ray.actors if actor.seen} == {"n0"}
    ray = FakeRay(double, nodes=2)
    ray.start = lambda actor: f"no model on {actor.node}"
    with pytest.raises(UserError, match=r"no worker could start(.|\n)*no model on n"):
        run(ray, [Task(1)])


def test_a_worker_that_is_killed_while_it_starts_is_started_again(run):
    ray, kills = FakeRay(double), iter(range(MOST_STARTS - 1))

    def start(actor):
        if next(kills, None) is not None:
            raise RayError("The actor died unexpectedly.")

    ray.start = start
    results, pool, said = run(ray, [Task(i) for i in range(6)], workers=1)
    assert sorted(results) == [(i, 2 * i) for i in range(6)]
    assert pool.ended == len(said) == MOST_STARTS - 1 and "could not start" in said[0]
    ray, kills = FakeRay(double), iter(range(MOST_STARTS))
    ray.start = start
    with pytest.raises(UserError, match=r"no worker could start: worker 3 on n0 .*died"):
        run(ray, [Task(1)], workers=1)


def test_workers_that_only_end_end_the_job(run):
    def work(actor, payload):
        raise Die

    with pytest.raises(UserError, match=f"{MOST_IN_A_ROW} workers ended one after the other"):
        run(FakeRay(work), [Task(i) for i in range(50)], workers=1)


def test_turns_stay_on_one_worker_and_begin_anew_with_another(run):
    killed = []

    def work(actor, payload):
        if payload == "s4" and not killed:
            killed.append(actor.number)
            raise Die
        return actor.number

    tasks = [
        Task(f"s{i // 2}" if i % 2 else f"t{i}", group="s" if i % 2 else None) for i in range(12)
    ]
    ray = FakeRay(work)
    results, pool, _ = run(ray, tasks)
    assert len(results) == 12 and len(dict(results)) == 12
    seen = [[p for p in actor.seen if p.startswith("s")] for actor in ray.actors]
    assert [s for s in seen if s] == [[f"s{i}" for i in range(5)], [f"s{i}" for i in range(6)]]
    pool.end_group("s")


def test_workers_of_a_cluster(monkeypatch):
    def asked(nodes, options=None, **scale):
        monkeypatch.setattr("moejax.serve.cluster.fleet.nodes", lambda: nodes)
        return worker_options(Generator, "demo", options or {}, Scale(**scale))

    cpus = [Node("a", "1", 8, 0), Node("b", "2", 8, 0)]
    found = asked(cpus)
    assert (found.count, found.cpus, found.gpus, found.options["threads"]) == (2, 8, 0, 8)
    assert (asked(cpus, workers=4).cpus, asked(cpus, workers=3).cpus) == (4, 4)
    gpus = [Node("a", "1", 64, 8), Node("b", "2", 64, 8), Node("head", "3", 4, 0)]
    found = asked(gpus)
    assert (found.count, found.cpus, found.gpus) == (16, 8, 1) and "threads" not in found.options
    assert asked(gpus, {"device": "cpu"}).gpus == 0
    with pytest.raises(UserError, match="16 cores, and no node of the cluster has more than 8"):
        asked(cpus, cores_per_worker=16)
    with pytest.raises(UserError, match="workers must be at least 1"):
        asked(cpus, workers=0)
    with pytest.raises(UserError, match="driver"):
        asked(cpus, {"driver": "x"})


def test_stats_are_summed_and_stragglers_named():
    def worker(number, tokens, seconds):
        stats = {
            "generated_tokens": tokens,
            "prompt_tokens": 10,
            "experts": {"activations": 100, "fills": 10, "read_through": 5, "hit_rate": 0.85},
            "bytes": {"fill": 1000, "read_through": 500},
            "store_bytes": 7,
            "store": {"kind": "shared"},
            "time": {"prefill_s": seconds / 2, "decode_s": seconds / 2},
        }
        named = dict(worker=number, host="h", node="n", pid=1, results=2, start_s=1.0)
        return {**named, "ready_s": 2 * seconds, "stats": stats}

    found = merged([worker(1, 100, 1.0), worker(2, 120, 1.0), worker(3, 40, 1.0)], ended=1)
    assert [row["straggler"] for row in found["workers"]] == [False, False, True]
    assert (found["tokens_per_s"], found["generated_tokens"], found["misses"]) == (260, 260, 45)
    assert (found["moved_bytes"], found["results"], found["ended_workers"]) == (4500, 6, 1)
    assert found["hit_rate"] == pytest.approx(0.85)
