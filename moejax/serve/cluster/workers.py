"""Workers on Ray: actors that are handed work and give results while they do it.

Ray places the actors, says when one has ended, and brings what they yield. Ours is what a job needs
beyond that: an input that ends workers becomes an error of its own, nothing that was
yielded is done again, and a worker that hangs is named and ended.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import dataclasses
import itertools
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from moejax.errors import UserError
from moejax.serve.cluster.ray_cluster import Node, nodes, require_ray

MOST_ENDS = 3
"""Ends of workers that one piece of work may be there for: in company, then alone."""
MOST_STARTS = 3
"""Times that a worker may end while it starts, before it is left out."""
MOST_IN_A_ROW = 6
"""Ends of workers without a result in between, before all is given up."""

PLACE_S = 600.0
"""How long Ray may take to find a worker a place."""
ANSWER_S = 60.0
"""How long a worker may take to say that it lives."""
MOVE_S = 1800.0
"""How long a worker that has work may take for one step of it."""
BEAT_S = 2.0
"""How often a worker says that it lives."""
GATHER_S = 0.1
"""How long a worker gathers results: bringing them costs milliseconds at both ends."""
CLOSE_S, INTERRUPTED_S = 10.0, 0.2
"""How long workers may take to free what they share, at the end and after an error or Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a worker says every BEAT_S. moves: another number whenever work goes on."""

    host: str
    pid: int
    moves: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Started:
    """A worker that takes work. room: pieces of work that it should have at once."""

    room: int
    seconds: float


class Worker(abc.ABC):
    """An actor. Ray's dashboard shows it by its name."""

    tokens = 0
    """Generated or scored so far."""

    async def beat(self, seconds: float) -> Beat:
        """What it says after so many seconds."""
        await asyncio.sleep(seconds)
        return Beat(platform.node(), os.getpid(), self._moves(), self.tokens)

    def _moves(self) -> float:
        return time.monotonic()

    @abc.abstractmethod
    async def start(self, *arguments: Any) -> Started | str:
        """Makes it ready for work, or says what is wrong with it here."""

    async def run(self, items: Sequence[Any]) -> AsyncIterator[list[tuple[int, Any, bool]]]:
        """Does pieces of work; yields (place, what came of it, whether that was all), as it comes.
        A UserError is of the piece alone; whatever else is raised ends the worker."""
        running = {asyncio.create_task(self._answer(item)): i for i, item in enumerate(items)}
        while running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(GATHER_S)
            done = [task for task in running if task.done()]
            yield [(running.pop(task), task.result(), True) for task in done]

    async def _answer(self, item: Any) -> Any:
        try:
            return await self._work(item)
        except UserError as error:
            return UserError(str(error))

    async def _work(self, item: Any) -> Any:
        """What comes of one piece of work."""
        raise NotImplementedError

    async def stats(self) -> dict[str, Any]:
        """What it says of itself."""
        return {}

    async def close(self) -> None:
        """Gives up what would outlive the process, which is ended then."""
        return


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """What each worker is and gets. arguments: of `start`. on: nodes of which each is one worker's,
    with all its CPUs, and all its GPUs if any are asked for; empty: wherever Ray likes."""

    kind: type[Worker]
    arguments: tuple[Any, ...]
    count: int
    cpus: float
    gpus: float = 0.0
    on: tuple[Node, ...] = ()


class WorkersEnded(UserError):
    """Workers ended while they did a piece of work, at last alone with it."""


@dataclasses.dataclass(eq=False)
class _Item:
    """A piece of work. ends: workers that ended while they had it."""

    payload: Any
    ends: int = 0


@dataclasses.dataclass(eq=False)
class _Member:
    """An actor as the driver sees it."""

    number: int
    node: Node | None
    """The one that it has to itself."""
    handle: Any
    beating: Any
    """The reference to its next Beat."""
    starting: Any
    """The reference to what `start` says; None: it has started."""
    starts: int
    """Which try of starting it this is."""
    beat: Beat | None = None
    room: int = 0
    streams: dict[Any, list[_Item | None]] = dataclasses.field(default_factory=dict)
    """Ray's generator of a batch of work → its pieces; None: those that are done."""
    heard: float = dataclasses.field(default_factory=time.monotonic)
    moved: float = dataclasses.field(default_factory=time.monotonic)
    start_s: float = 0.0
    results: int = 0

    @property
    def name(self) -> str:
        place = "" if self.beat is None else f" (process {self.beat.pid} on {self.beat.host})"
        return f"worker {self.number}{place}"

    @property
    def items(self) -> list[_Item]:
        """What it has to do."""
        return [item for batch in self.streams.values() for item in batch if item is not None]


class Workers:
    """Workers that do pieces of work; a context manager, which ends them. warn: told what goes
    wrong with workers while others go on."""

    def __init__(self, asked: WorkerOptions, warn: Callable[[str], None] = lambda text: None):
        self._asked, self._warn, self._ray = asked, warn, require_ray()
        self._members: list[_Member] = []
        self._queue: collections.deque[_Item] = collections.deque()
        self._suspects: collections.deque[_Item] = collections.deque()
        """What workers had that ended: at the end, each alone with a worker."""
        self._left_out: list[str] = []
        self._numbers = itertools.count(1)
        self._in_a_row = self._tokens_before = 0
        self.ended = 0
        """Workers that ended before their time."""
        # One a node first: by then what compiles is in the cache, and the shared experts are there.
        self._start(min(asked.count, max(len(nodes()), 1)))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends all workers, which free what they share if they can."""
        closing = [member.handle.close.remote() for member in self._members if member.room]
        try:
            if closing:
                seconds = CLOSE_S if kind is None else INTERRUPTED_S
                self._ray.wait(closing, num_returns=len(closing), timeout=seconds)
        finally:
            for member in self._members:
                self._ray.kill(member.handle, no_restart=True)

    @property
    def tokens(self) -> int:
        """Tokens of all workers so far."""
        return self._tokens_before + sum(
            member.beat.tokens for member in self._members if member.beat is not None
        )

    def run(
        self, work: Iterable[Any], pack: Callable[[Any], Any] = lambda item: item
    ) -> Iterator[tuple[Any, Any]]:
        """(piece of work, what came of it) as it comes, also in several parts, where a worker gives
        such. A UserError in its place is what is wrong with it; WorkersEnded: it ended them.

        Work is taken only as there is room for it. pack: what of a piece is sent to a worker. What
        a worker had when it ended is done again when all other work is done, by a worker that has
        nothing else. Raises UserError where no worker can start, or workers only end.
        """
        waiting, more = iter(work), True
        while True:
            room = max((member.room for member in self._members), default=0) or 64
            while more and len(self._queue) < room * self._asked.count:
                payload = next(waiting, None)
                more = payload is not None
                if more:
                    self._queue.append(_Item(payload))
            busy = any(member.streams for member in self._members)
            if not (more or busy or self._queue or self._suspects):
                return
            self._hand_out(more, pack)
            yield from self._hear()
            yield from self._end_hung()

    def stats(self) -> list[dict[str, Any]]:
        """What each worker that lives says of itself, with its number and place."""
        live = [member for member in self._members if member.room and member.beat is not None]
        asked = [(member, member.handle.stats.remote()) for member in live]
        found = []
        for member, reference in asked:
            try:
                stats = self._ray.get(reference, timeout=CLOSE_S)
            except self._ray.exceptions.RayError:
                continue
            assert member.beat is not None
            place = {"worker": member.number, "host": member.beat.host, "pid": member.beat.pid}
            done = {"results": member.results, "start_s": member.start_s}
            found.append({**place, **done, "stats": stats})
        return found

    # ---- pieces

    def _start(self, count: int) -> None:
        """Starts so many more workers."""
        for _ in range(count):
            place = len(self._members) + len(self._left_out)
            self._members.append(
                self._new_member(self._asked.on[place] if self._asked.on else None)
            )

    def _new_member(self, node: Node | None, starts: int = 1) -> _Member:
        """Starts a worker, on this node alone or wherever Ray likes."""
        asked, number = self._asked, next(self._numbers)
        options: dict[str, Any] = {
            "num_cpus": asked.cpus if node is None else node.cpus,
            "num_gpus": asked.gpus if node is None or not asked.gpus else node.gpus,
            "name": f"moejax {asked.kind.__name__} {number} of {os.getpid()}-{id(self):x}",
            "scheduling_strategy": "SPREAD",
        }
        if node is not None:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(node.id, soft=False)
        handle = self._ray.remote(asked.kind).options(**options).remote()
        starting = handle.start.remote(*asked.arguments)
        return _Member(number, node, handle, handle.beat.remote(0.0), starting, starts)

    def _hand_out(self, more: bool, pack: Callable[[Any], Any]) -> None:
        ready = [member for member in self._members if member.room]
        left = len(self._queue) + sum(len(member.items) for member in ready)
        # The last pieces are for all, also for workers that are on their way.
        share = max(-(-left // self._asked.count), 1)
        for member in sorted(ready, key=lambda member: len(member.items)):
            has, room = len(member.items), member.room if more else min(member.room, share)
            # Not one by one: a batch costs milliseconds.
            if self._queue and (room - has >= room / 4):
                count = min(room - has, len(self._queue))
                self._give(member, [self._queue.popleft() for _ in range(count)], pack)
            elif self._suspects and not (more or self._queue or member.streams):
                self._give(member, [self._suspects.popleft()], pack)

    def _give(self, member: _Member, items: list[_Item], pack: Callable[[Any], Any]) -> None:
        if not member.streams:
            member.moved = time.monotonic()
        payloads = [pack(item.payload) for item in items]
        member.streams[member.handle.run.remote(payloads)] = [*items]

    def _hear(self) -> Iterator[tuple[Any, Any]]:
        """Waits for news of any worker, and yields what came of work."""
        of = {
            reference: member
            for member in self._members
            for reference in (*member.streams, member.beating, member.starting)
            if reference is not None
        }
        ready, _ = self._ray.wait([*of], num_returns=len(of), timeout=0)
        if not ready:
            ready, _ = self._ray.wait([*of], num_returns=1, timeout=1.0)
        for reference in ready:
            member = of[reference]
            if reference not in (*member.streams, member.beating, member.starting):
                continue  # it ended meanwhile
            try:
                if reference in member.streams:
                    yield from self._take(member, reference)
                elif reference == member.starting:
                    self._take_start(member, self._ray.get(reference))
                else:
                    self._take_beat(member, self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                yield from self._lose(member, _cause(error))

    def _take(self, member: _Member, stream: Any) -> Iterator[tuple[Any, Any]]:
        items = member.streams[stream]
        reference = next(stream, None)
        if reference is None:
            del member.streams[stream]
            return
        news = self._ray.get(reference)
        self._in_a_row, member.moved = 0, time.monotonic()
        for place, value, last in news:
            item = items[place]
            assert item is not None
            if last:
                items[place] = None
                member.results += 1
            yield item.payload, value

    def _take_start(self, member: _Member, said: Started | str) -> None:
        if isinstance(said, str):
            self._leave_out(member, said)
            return
        member.starting = None
        member.room, member.start_s = said.room, said.seconds
        self._start(self._asked.count - len(self._members) - len(self._left_out))

    def _take_beat(self, member: _Member, beat: Beat) -> None:
        member.heard = time.monotonic()
        if member.beat is None or beat.moves != member.beat.moves or not member.streams:
            member.moved = member.heard
        member.beat = beat
        member.beating = member.handle.beat.remote(BEAT_S)

    def _end_hung(self) -> Iterator[tuple[Any, Any]]:
        now = time.monotonic()
        for member in tuple(self._members):
            silent, still = now - member.heard, now - member.moved
            if member.beat is None and member.starting is not None and silent > PLACE_S:
                asks = f"{self._asked.cpus:g} CPUs and {self._asked.gpus:g} GPUs"
                why = f"Ray found no room of {asks} for it within {PLACE_S:.0f} s (ray status)"
                self._leave_out(member, why)
            elif member.beat is not None and silent > ANSWER_S:
                yield from self._lose(member, f"it does not answer for {silent:.0f} s")
            elif member.streams and still > MOVE_S:
                why = f"it answers, but its work has not moved for {still:.0f} s"
                yield from self._lose(member, why)

    def _lose(self, member: _Member, why: str) -> Iterator[tuple[Any, WorkersEnded]]:
        """A worker ended, or has to: another one is started, and does again what it had."""
        self._ray.kill(member.handle, no_restart=True)
        items, alone = member.items, len(member.items) == 1
        self.ended += 1
        self._in_a_row += 1
        self._tokens_before += 0 if member.beat is None else member.beat.tokens
        if member.starting is not None and member.starts >= MOST_STARTS:
            self._leave_out(member, why)
            return
        if self._in_a_row >= MOST_IN_A_ROW:
            raise UserError(
                f"{self._in_a_row} workers ended one after the other without a result; the last "
                f"was {member.name}: {why}"
            )
        self._warn(f"{member.name} ended: {why}; pieces of work that run again: {len(items)}")
        starts = 1 if member.starting is None else member.starts + 1
        self._members[self._members.index(member)] = self._new_member(member.node, starts)
        for item in items:
            item.ends += 1
            if alone and item.ends >= MOST_ENDS:
                self._in_a_row = 0
                text = f"{item.ends} workers ended while this ran, at last {member.name}: {why}"
                yield item.payload, WorkersEnded(text)
            else:
                self._suspects.append(item)

    def _leave_out(self, member: _Member, why: str) -> None:
        """Others go on. Raises UserError where there is none."""
        self._ray.kill(member.handle, no_restart=True)
        self._members.remove(member)
        self._left_out.append(f"{member.name} could not start: {why}")
        self._warn(self._left_out[-1])
        if not self._members:
            raise UserError("\n".join(self._left_out))


def _cause(error: BaseException) -> str:
    """Ray's own words, of which the first lines say it; of a Python error its last one."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    told = lines[-1:] if "Traceback" in str(error) or hasattr(error, "cause") else lines[:6]
    return f"{type(error).__name__}: {' '.join(told)[:500]}"
