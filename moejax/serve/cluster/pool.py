"""A pool of workers on Ray: who gets what, and what happens when one of them ends.

Ray Data's own pool of actors is what `moejax.ray.generate` uses. It is not used for jobs that have
to go on after a kill: it hands over blocks of rows, and runs a block whose worker died once more,
whole, on another worker. One row that kills workers then kills them until the job fails, results of
the block that were there are made again, and turns of a conversation have no place of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from moejax.errors import UserError
from moejax.serve.cluster.ray_cluster import Node, nodes, require_ray
from moejax.serve.cluster.worker import Outcome, Started, Worker, WorkerPlace

MOST_DEATHS = 4
"""Ends of workers and nodes that a task may be there for; alone with a worker one is enough."""

MOST_STARTS = 3
"""Workers that may be killed on one node while they start, before it gets no more. One that says
what is wrong there is enough."""

MOST_IN_A_ROW = 6
"""Workers that end one after the other, without a result in between, before the pool gives up."""

WAIT_S = 1.0
CLOSE_S = 10.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A piece of work. payload: of the worker's kind. cost: those with more run earlier. group:
    tasks of one group run on one worker, in the order in which they came."""

    payload: Any
    cost: float = 0.0
    group: str | None = None
    tag: object = None
    """The caller's own, which no worker gets."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """What each worker is and gets. kind: a class of moejax.serve.cluster.worker. options:
    keywords of LLM."""

    kind: type[Worker]
    model: str
    options: Mapping[str, Any]
    count: int
    cpus: float
    gpus: float = 0.0
    whole_nodes: bool = False
    """Each has a node to itself: all its CPUs, and all its GPUs if any are asked for; a node of
    fewer `cpus` or `gpus` gets none."""


@dataclasses.dataclass(eq=False)
class _Unit:
    """Tasks that one worker has to do in order: one, or those of a group so far."""

    tasks: list[Task]
    done: list[bool]
    deaths: int = 0
    handed: int = 0
    """How many its worker was given."""
    member: _Member | None = None
    queued: bool = False
    """It waits for a worker."""
    error: UserError | None = None
    """Why it was given up, with all of the group that comes later."""

    @property
    def cost(self) -> float:
        return sum(task.cost for task in self.tasks)

    @property
    def complete(self) -> bool:
        return all(self.done)


@dataclasses.dataclass(eq=False)
class _Member:
    """A worker as the pool sees it."""

    number: int
    handle: Any
    where: Any
    """A reference to its Place, then None."""
    starting: Any = None
    """A reference to what `start` says, then None."""
    taking: Any = None
    """A reference to what `take` says."""
    place: WorkerPlace | None = None
    node: str | None = None
    """The node that it has to itself."""
    room: int = 0
    """0: it has not started."""
    has: dict[int, tuple[_Unit, int]] = dataclasses.field(default_factory=dict)
    """Number of a task -> its unit, and which of its tasks it is."""
    alone: bool = False
    """It is for units that may have ended a worker, one at a time."""
    tokens: int = 0
    results: int = 0
    start_s: float = 0.0
    began: float = dataclasses.field(default_factory=time.perf_counter)
    ready: float = 0.0

    @property
    def name(self) -> str:
        place = "" if self.place is None else f" on {self.place.host} ({self.place.address})"
        return f"worker {self.number}{place}"


class WorkersEnded(UserError):
    """A task's workers ended, one alone with it."""


class Pool:
    """Workers that do tasks; a context manager, which ends them. warn: told what goes wrong with
    workers while others go on."""

    def __init__(self, asked: WorkerOptions, warn: Callable[[str], None] = lambda text: None):
        self._asked, self._warn, self._ray = asked, warn, require_ray()
        self._members: list[_Member] = []
        self._numbers, self._task_numbers = itertools.count(1), itertools.count()
        self._order = itertools.count()
        self._queue: list[tuple[float, int, _Unit]] = []
        self._suspects: collections.deque[_Unit] = collections.deque()
        self._groups: dict[str, _Unit] = {}
        self._given: list[tuple[Task, UserError]] = []
        """Tasks of groups that were given up, with why."""
        self._bad_nodes: dict[str, str] = {}
        self._start_deaths: collections.Counter[str] = collections.Counter()
        """Node → workers that ended while they started there."""
        self._wanted, self._in_a_row = asked.count, 0
        self._lost_tokens = 0
        self.ended = 0
        """Workers that ended before their time."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokens(self) -> int:
        """Tokens of all workers so far, lost ones included."""
        return self._lost_tokens + sum(member.tokens for member in self._members)

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any | UserError]]:
        """Each task with its result, in order of completion, or with a UserError for what is wrong
        with it. Tasks are taken only as there is room for them.

        A task that a worker had when it ended is run again by another one, and alone: if that
        one ends too, this is the task's error. When a whole node ended, it is just run again.
        Raises UserError when there is nowhere left to run, or workers only end.

        A worker may give a result in pieces, each of which is yielded as it comes, and None at the
        end. What its payload holds is sent again as it is then: who takes from it what has come
        has only the rest done again.
        """
        waiting, more = iter(tasks), True
        while True:
            # Enough to choose from: those of much cost go first.
            while more and len(self._queue) < self._window:
                task = next(waiting, None)
                if task is None:
                    more = False
                else:
                    self._add(task)
                    yield from self._given
                    self._given.clear()
            busy = any(member.has for member in self._members)
            if not (more or busy or self._queue or self._suspects):
                return
            self._start_missing()
            self._hand_out(more)
            yield from self._wait()

    def end_group(self, group: str) -> None:
        """Forgets a group, whose tasks are done."""
        unit = self._groups.pop(group, None)
        if unit is not None and unit.member is not None:
            unit.member.handle.end_session.remote(group)

    def stats(self) -> list[dict[str, Any]]:
        """What each worker that lives says of itself, with its number and place."""
        live = [member for member in self._members if member.room and member.place is not None]
        asked = [(member, member.handle.stats.remote()) for member in live]
        found = []
        for member, reference in asked:
            try:
                stats = self._ray.get(reference, timeout=CLOSE_S)
            except self._ray.exceptions.RayError:
                continue
            assert member.place is not None
            found.append(
                {
                    "worker": member.number,
                    **dataclasses.asdict(member.place),
                    "results": member.results,
                    "start_s": member.start_s,
                    "ready_s": time.perf_counter() - member.ready,
                    "stats": stats,
                }
            )
        return found

    def close(self) -> None:
        """Ends all workers, which free what is shared if they can. Idempotent."""
        members, self._members = self._members, []
        try:
            # Who is still starting holds what the others could not free.
            for member in members:
                if not member.room:
                    self._ray.kill(member.handle, no_restart=True)
            closing = [member.handle.close.remote() for member in members if member.room]
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        finally:
            for member in members:
                self._ray.kill(member.handle, no_restart=True)

    # ---- tasks

    @property
    def _window(self) -> int:
        room = [member.room for member in self._members if member.room]
        return self._wanted * (max(room, default=0) or 64)

    def _add(self, task: Task) -> None:
        unit = None if task.group is None else self._groups.get(task.group)
        if unit is None:
            unit = _Unit([task], [False])
            if task.group is not None:
                self._groups[task.group] = unit
        elif unit.error is not None:
            self._given.append((task, unit.error))
            return
        else:
            unit.tasks.append(task)
            unit.done.append(False)
            if unit.member is not None:
                self._put(unit.member, unit)
                return
        self._enqueue(unit)

    def _enqueue(self, unit: _Unit, first: bool = False) -> None:
        if not unit.queued:
            unit.queued = True
            cost = math.inf if first else unit.cost
            heapq.heappush(self._queue, (-cost, next(self._order), unit))

    def _hand_out(self, more: bool) -> None:
        ready = [member for member in self._members if member.room]
        if not ready:
            return
        tester = next((member for member in ready if member.alone), None)
        if self._suspects and tester is None:
            tester = min(ready, key=lambda member: len(member.has))
            tester.alone = True
        if tester is not None and not tester.has:
            if self._suspects:
                unit = self._suspects.popleft()
                unit.queued = False
                self._put(tester, unit)
            else:
                tester.alone = False
        left = len(self._queue) + sum(len(member.has) for member in self._members)
        # The last tasks are for all, also for workers that are on their way.
        share = max(-(-left // max(self._wanted, 1)), 1)
        for member in sorted(ready, key=lambda member: len(member.has)):
            room = member.room if more else min(member.room, share)
            while self._queue and not member.alone and len(member.has) < room:
                unit = heapq.heappop(self._queue)[2]
                unit.queued = False
                self._put(member, unit)

    def _put(self, member: _Member, unit: _Unit) -> None:
        """Gives the worker what it lacks of the unit."""
        new = []
        for place in range(unit.handed, len(unit.tasks)):
            number = next(self._task_numbers)
            member.has[number] = unit, place
            new.append((number, unit.tasks[place].payload))
        unit.member, unit.handed = member, len(unit.tasks)
        if new:
            member.handle.put.remote(new)

    # ---- workers

    def _start_missing(self) -> None:
        """One worker a node first, the others when one has started: by then what compiles is in the
        cache, and the host's store of experts is there."""
        if len(self._members) >= self._wanted:
            return
        alive = nodes()
        first = sum(node.id not in self._bad_nodes for node in alive)
        ready = any(member.room for member in self._members)
        wanted = self._wanted if ready else min(self._wanted, max(first, 1))
        taken = {member.node for member in self._members}
        free = (n for n in alive if n.id not in taken | self._bad_nodes.keys())
        whole = (node for node in free if _fits(node, self._asked))
        for _ in range(wanted - len(self._members)):
            node = next(whole, None) if self._asked.whole_nodes else None
            if node is None and self._asked.whole_nodes:
                return
            self._members.append(self._new_member(node))

    def _new_member(self, whole: Node | None) -> _Member:
        """Starts a worker, on this node alone or wherever Ray likes."""
        number, asked = next(self._numbers), self._asked
        options: dict[str, Any] = {
            "num_cpus": asked.cpus,
            "num_gpus": asked.gpus,
            "name": f"moejax {asked.model} worker {number} {id(self):x}",
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
        }
        if whole is not None:
            options["num_cpus"], options["num_gpus"] = whole.cpus, whole.gpus if asked.gpus else 0.0
            options["label_selector"] = {"ray.io/node-id": whole.id}
            del options["scheduling_strategy"]
        elif self._bad_nodes:
            bad = ",".join(self._bad_nodes)
            options["label_selector"] = {"ray.io/node-id": f"!in({bad})"}
            del options["scheduling_strategy"]
        handle = self._ray.remote(asked.kind).options(**options).remote()
        where = handle.where.remote()
        starting = handle.start.remote(asked.model, dict(asked.options))
        return _Member(number, handle, where, starting, node=whole and whole.id)

    def _wait(self) -> Iterator[tuple[Task, Any | UserError]]:
        """Waits for news of any worker, and yields results among them."""
        of: dict[Any, _Member] = {}
        for member in self._members:
            reference = member.where or member.starting or member.taking
            of[reference] = member
        done, _ = self._ray.wait([*of], num_returns=len(of), timeout=0)
        if not done:
            done, _ = self._ray.wait([*of], num_returns=1, timeout=WAIT_S)
        for reference in done:
            member = of[reference]
            try:
                news = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                yield from self._lost(member, _cause(error), killed=True)
                continue
            if isinstance(news, WorkerPlace):
                member.place, member.where = news, None
            elif isinstance(news, Started):
                member.starting, member.room, member.start_s = None, news.room, news.start_s
                member.ready = time.perf_counter()
                member.taking = member.handle.take.remote()
            elif isinstance(news, str):
                yield from self._lost(member, news)
            else:
                outcomes, member.tokens = news
                yield from self._taken(member, outcomes)

    def _taken(
        self, member: _Member, outcomes: list[Outcome]
    ) -> Iterator[tuple[Task, Any | UserError]]:
        if broken := next((one.broken for one in outcomes if one.broken is not None), None):
            outcomes = [one for one in outcomes if one.broken is None]
        else:
            member.taking = member.handle.take.remote()
        for one in outcomes:
            self._in_a_row = 0
            if one.part:
                unit, place = member.has[one.task]
                yield unit.tasks[place], one.value
                continue
            unit, place = member.has.pop(one.task)
            if not unit.done[place]:
                unit.done[place] = True
                member.results += 1
                yield unit.tasks[place], one.value if one.error is None else UserError(one.error)
        if broken:
            yield from self._lost(member, broken)

    def _lost(
        self, member: _Member, why: str, killed: bool = False
    ) -> Iterator[tuple[Task, UserError]]:
        """A worker that ended, or never started: it said why, or was killed."""
        self._members.remove(member)
        self._lost_tokens += member.tokens
        self._ray.kill(member.handle, no_restart=True)
        started, alone = member.room > 0, member.alone
        gone = member.place is not None and all(n.id != member.place.node for n in nodes())
        units = dict.fromkeys(unit for unit, _ in member.has.values())
        for group_unit in self._groups.values():
            if group_unit.member is member:
                group_unit.member, group_unit.handed = None, 0
        self.ended += 1
        self._in_a_row += 1
        if not started and not gone:
            self._not_started(member, why, killed)
        elif self._in_a_row >= MOST_IN_A_ROW:
            raise UserError(
                f"{self._in_a_row} workers ended one after the other without a result; the last "
                f"was {member.name}: {why}"
            )
        again = len(units)
        for unit in units:
            unit.member, unit.handed = None, 0
            unit.deaths += 1
            if (alone and not gone) or unit.deaths >= MOST_DEATHS:
                again -= 1
                yield from self._given_up(unit, member, why)
            elif gone:
                self._enqueue(unit, first=True)
            elif not unit.queued:
                unit.queued = True
                self._suspects.append(unit)
        if started or gone:
            self._warn(f"{member.name} ended: {why}; units of work that run again: {again}")

    def _given_up(self, unit: _Unit, member: _Member, why: str) -> Iterator[tuple[Task, UserError]]:
        error = unit.error = WorkersEnded(
            f"workers ended while this ran, {unit.deaths} times, at last {member.name}: {why}"
        )
        for place, task in enumerate(unit.tasks):
            if not unit.done[place]:
                unit.done[place] = True
                yield task, error

    def _not_started(self, member: _Member, why: str, killed: bool) -> None:
        """Other nodes go on; raises UserError where there is none."""
        node = None if member.place is None else member.place.node
        self._warn(f"{member.name} could not start: {why}")
        if node is not None:
            self._start_deaths[node] += 1
            if not killed or self._start_deaths[node] >= MOST_STARTS:
                self._bad_nodes[node] = f"{member.name}: {why}"
        elif self._in_a_row >= MOST_IN_A_ROW:
            raise UserError(f"no worker can be started: {why}")
        if any(each.id not in self._bad_nodes and _fits(each, self._asked) for each in nodes()):
            return
        # Those that have started on this node are fine; only more of them are not possible.
        self._wanted = sum(each.room > 0 for each in self._members)
        if not self._wanted:
            raise UserError("no worker could start: " + "\n".join(self._bad_nodes.values()))


def _fits(node: Node, asked: WorkerOptions) -> bool:
    return node.cpus >= asked.cpus and node.gpus >= asked.gpus


def _cause(error: BaseException) -> str:
    """Ray's own words, of which the first lines say it."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:6])[:500]}"
