"""Workers on Ray: actors with a model each, which are handed pieces of work.

Ray places the actors, says when one has ended, and brings their results. This module adds what a
job needs beyond that: an input that ends workers becomes an error of its own, no result that has
arrived is computed again, and a worker that hangs is named and ended.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import dataclasses
import itertools
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from moejax.checkpoints.shared_memory import NoSharedMemory
from moejax.device import select_device
from moejax.errors import UserError
from moejax.serve.cluster.ray_cluster import LOCAL, explain_end, nodes, own_cpus, require_ray
from moejax.serve.llm import LLM
from moejax.start.options import Config, refuse_unequal
from moejax.start.provenance import weights_of

log = logging.getLogger("moejax")

MOST_ENDS = 3
"""Workers that may end while one piece of work runs: first beside other work, then alone."""
MOST_IN_A_ROW = 6
"""Workers that may end in a row without a result before the job ends."""

PLACE_S = 600.0
"""Seconds that Ray may take to find a place for a worker, while no other worker has one."""
ANSWER_S = 60.0
"""Seconds that a worker may take to say that it is alive."""
MOVE_S = 1800.0
"""Seconds that a worker may take for one step of its work."""
START_S = 7200.0
"""Seconds that a worker which answers may take to start: a model of terabytes loads slowly."""
BEAT_S = 2.0
"""Seconds between two messages of a worker that it is alive."""
GATHER_S = 0.1
"""Seconds for which results are gathered, since asking Ray for each alone costs milliseconds."""
CLOSE_S, INTERRUPTED_S = 10.0, 0.2
"""Seconds that workers may take to free what they share, at the end and after an error or
Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a model is spread over a cluster.

    - `address`: of Ray.
    - `workers`, `cores_per_worker`: None: `worker_options` chooses.
    """

    address: str = LOCAL
    workers: int | None = None
    cores_per_worker: int | None = None

    def __post_init__(self):
        for name in ("workers", "cores_per_worker"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")

    @property
    def cpus(self) -> int:
        """CPUs of a local Ray: as many as its workers ask for, so that there can be more workers
        than cores."""
        return max(own_cpus(), (self.workers or 1) * (self.cores_per_worker or 1))


@dataclasses.dataclass(frozen=True)
class Beat:
    """The message that a worker sends every BEAT_S.

    - `moves`: changes whenever the worker's work proceeds.
    """

    host: str
    pid: int
    moves: float
    tokens: int


OTHER_OPS = (
    "chose other ops than other workers, by the kernels that were found right on its machine; "
    "run moejax check-gpu there, or give --ops xla"
)
"""What is wrong with a worker whose results would have other bits."""


@dataclasses.dataclass(frozen=True)
class Started:
    """A worker that takes work.

    - `room`: pieces of work that it should have at once.
    - `weights`: see weights_of.
    - `chosen`: see LLM.chosen.
    """

    room: int
    seconds: float
    weights: str | None = None
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Worker(abc.ABC):
    """An actor with one LLM. Ray's dashboard shows it by the name of its class."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    async def start(self, model: str, options: Mapping[str, Any]) -> Started | str:
        """Loads the model. If that fails, returns what is wrong."""
        try:
            self._llm = await asyncio.to_thread(load_on_worker, model, options)
            seconds = self._llm.stats()["time"]["total_s"]
            weights = await asyncio.to_thread(weights_of, model, options.get("step"))
            return Started(self._begin(self._llm), seconds, weights, self._llm.chosen)
        except (UserError, MemoryError, ValueError) as error:
            return str(error) or type(error).__name__

    @abc.abstractmethod
    def _begin(self, llm: LLM) -> int:
        """Begins to serve with a loaded model. Returns how many pieces of work the worker should
        have."""

    async def beat(self, seconds: float) -> Beat:
        """Returns the state of the worker after so many seconds."""
        await asyncio.sleep(seconds)
        tokens = 0 if self._llm is None else self._llm.generated_tokens
        return Beat(platform.node(), os.getpid(), self._moves(), tokens)

    def _moves(self) -> float:
        return 0 if self._llm is None else sum(self._llm.engine.statistics.steps.values())

    async def run(self, piece: Any) -> Any:
        """Does a piece of work. Returns a UserError that the work raises; any other exception ends
        the worker."""
        try:
            return await self._work(piece)
        except UserError as error:
            return UserError(str(error))

    @abc.abstractmethod
    async def _work(self, piece: Any) -> Any:
        """Returns the result of a piece of work."""

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats`."""
        assert self._llm is not None
        return await asyncio.to_thread(self._llm.stats)

    async def close(self) -> None:
        """Frees the model. The last worker of a machine removes shared experts."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


def load_on_worker(model: str, options: Mapping[str, Any]) -> LLM:
    """Returns the LLM. The workers of a machine share its experts, unless the options name a store
    or the machine has no shared memory for them, which the log warns of."""
    given = {name: value for name, value in options.items() if value is not None}
    dense = given.get("precision") in (None, "dense")
    on_cpu = select_device(given.get("device"), given.get("threads")).platform == "cpu"
    if dense and on_cpu and "store" not in given:
        try:
            return LLM(model, progress=False, store="shared", **given)
        except NoSharedMemory as error:
            log.warning("each worker holds the experts for itself: %s", error)
    return LLM(model, progress=False, **given)


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """The kind of each worker and its resources.

    - `arguments`: those of `Worker.start`.
    - `weights`: those that a worker must have; None: those of the first one that starts.
    """

    kind: type[Worker]
    arguments: tuple[Any, ...]
    count: int
    cpus: float
    gpus: float = 0.0
    weights: str | None = None


def worker_options(
    kind: type[Worker], model: str, options: Mapping[str, Any], scale: Scale
) -> WorkerOptions:
    """Returns the workers of a connected cluster: one for each GPU, with its share of the node's
    CPUs. Without GPUs, or with device "cpu": one for each node, with all its CPUs; if more workers
    are asked for, they divide the CPUs. Raises UserError if no node has room for a worker, and for
    options that can never work."""
    why = "workers that share a job out must give the results of one"
    Config.of(model, **options)  # refuses what no model has
    refuse_unequal(options, why)
    alive, given = nodes(), dict(options)
    on_gpu = any(node.gpus >= 1 for node in alive) and given.get("device") != "cpu"
    useful = [node for node in alive if node.gpus >= 1] if on_gpu else alive
    default = sum(int(node.gpus) for node in useful) if on_gpu else len(useful)
    count = scale.workers or max(default, 1)
    a_node = -(-count // max(len(useful), 1))
    free = min((node.cpus / (node.gpus if on_gpu else a_node) for node in useful), default=1)
    cores = scale.cores_per_worker or max(int(free), 1)
    if all(node.cpus < cores for node in useful):
        most = max((int(node.cpus) for node in useful), default=0)
        raise UserError(
            f"a worker asks for {cores} cores, and no node of the cluster has more than {most}; "
            "give fewer as --cores-per-worker"
        )
    if not on_gpu:
        given.setdefault("threads", cores)
    weights = weights_of(model, given.get("step"))
    return WorkerOptions(kind, (model, given), count, cores, 1.0 if on_gpu else 0.0, weights)


class WorkersEnded(UserError):
    """Workers ended while they ran a piece of work, the last one alone with it."""


@dataclasses.dataclass(eq=False)
class _Item:
    """A piece of work.

    - `ends`: number of workers that ended while they had it.
    """

    payload: Any
    ends: int = 0


@dataclasses.dataclass(eq=False)
class _Member:
    """An actor as the driver process sees it."""

    number: int
    handle: Any
    beating: Any
    """The reference to its next Beat."""
    starting: Any
    """The reference to the result of `start`; None: the actor has started."""
    beat: Beat | None = None
    room: int = 0
    tasks: dict[Any, _Item] = dataclasses.field(default_factory=dict)
    """The piece of work of each reference to a result."""
    heard: float = dataclasses.field(default_factory=time.monotonic)
    moved: float = dataclasses.field(default_factory=time.monotonic)
    start_s: float = 0.0
    results: int = 0

    @property
    def name(self) -> str:
        place = "" if self.beat is None else f" (process {self.beat.pid} on {self.beat.host})"
        return f"worker {self.number}{place}"


class Workers:
    """Workers that do pieces of work; a context manager that ends them.

    - `warn`: called with what goes wrong with workers while others continue.
    """

    def __init__(self, asked: WorkerOptions, warn: Callable[[str], None] = lambda text: None):
        self._asked, self._warn, self._ray = asked, warn, require_ray()
        self._members: list[_Member] = []
        self._suspects: collections.deque[_Item] = collections.deque()
        """Pieces of work whose workers ended. They run last, each alone with a worker."""
        self._numbers, self._in_a_row = itertools.count(1), 0
        self.weights = asked.weights
        """Those of every worker; None: not known yet."""
        self.chosen: Mapping[str, Any] | None = None
        """What every worker chose (LLM.chosen); None: not known yet."""
        self.ended = 0
        """Number of workers that ended too early."""
        # Start one worker a node first, so that others find its compiled steps and shared experts.
        self._start(min(asked.count, max(len(nodes()), 1)))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends all workers. They free what they share if they can."""
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
        """Tokens so far of the living workers."""
        return sum(member.beat.tokens for member in self._members if member.beat is not None)

    def run(
        self, work: Iterable[Any], pack: Callable[[Any], Any] = lambda item: item
    ) -> Iterator[tuple[Any, Any]]:
        """Yields (piece of work, its result) as results come. A UserError as the result says what
        is wrong with the piece; WorkersEnded says that it ended workers.

        Work is taken only as there is room for it. If a worker ends, its pieces run again after all
        other work, each alone with a worker.

        - `pack`: the part of a piece that is sent to a worker.

        Raises UserError if no worker can start, or if workers only end.
        """
        waiting, more = map(_Item, work), True
        queue: collections.deque[_Item] = collections.deque()
        while True:
            ready = [member for member in self._members if member.room]
            most = self._asked.count * max((member.room for member in ready), default=64)
            if more:
                queue.extend(itertools.islice(waiting, max(most - len(queue), 0)))
                more = len(queue) >= most
            left = len(queue) + sum(len(member.tasks) for member in ready)
            if not (more or left or self._suspects):
                return
            # Leave some of the last pieces to workers that are still starting.
            share = most if more else -(-left // self._asked.count)
            for member in sorted(ready, key=lambda member: len(member.tasks)):
                while queue and len(member.tasks) < min(member.room, share):
                    self._give(member, queue.popleft(), pack)
                if self._suspects and not (more or queue or member.tasks):
                    self._give(member, self._suspects.popleft(), pack)
            yield from self._hear()
            yield from self._end_hung()

    def stats(self) -> list[dict[str, Any]]:
        """Returns what each living worker says about itself, with its number and place."""
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
        """Starts `count` more workers."""
        self._members += [self._new_member() for _ in range(count)]

    def _new_member(self) -> _Member:
        asked, number = self._asked, next(self._numbers)
        handle = (
            self._ray.remote(asked.kind)
            .options(
                num_cpus=asked.cpus,
                num_gpus=asked.gpus,
                name=f"moejax {asked.kind.__name__} {number} of {os.getpid()}-{id(self):x}",
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        starting = handle.start.remote(*asked.arguments)
        return _Member(number, handle, handle.beat.remote(0.0), starting)

    def _give(self, member: _Member, item: _Item, pack: Callable[[Any], Any]) -> None:
        if not member.tasks:
            member.moved = time.monotonic()
        member.tasks[member.handle.run.remote(pack(item.payload))] = item

    def _hear(self) -> Iterator[tuple[Any, Any]]:
        """Waits for news of any worker and yields results."""
        of = {
            reference: member
            for member in self._members
            for reference in (*member.tasks, member.beating, member.starting)
            if reference is not None
        }
        self._ray.wait([*of], num_returns=1, timeout=1.0)
        ready, _ = self._ray.wait([*of], num_returns=len(of), timeout=GATHER_S)
        ended: dict[_Member, str] = {}
        for reference in ready:
            member = of[reference]
            try:
                found = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                ended.setdefault(member, explain_end(error))
                continue
            if reference in member.tasks:
                self._in_a_row, member.moved = 0, time.monotonic()
                member.results += 1
                yield member.tasks.pop(reference).payload, found
            elif reference == member.starting:
                self._take_start(member, found)
            else:
                self._take_beat(member, found)
        for member, why in ended.items():  # with what its last results have left
            yield from self._lose(member, why)

    def _take_start(self, member: _Member, found: Started | str) -> None:
        if isinstance(found, str):
            raise UserError(f"{member.name} could not start: {found}")
        self.weights = self.weights or found.weights
        if found.weights != self.weights:
            raise UserError(
                f"{member.name} has other weights at the model's path than this machine, other "
                "workers or the results so far; copy the checkpoint there anew"
            )
        self.chosen = found.chosen if self.chosen is None else self.chosen
        if found.chosen != self.chosen:
            raise UserError(f"{member.name} {OTHER_OPS}")
        member.starting = None
        member.room, member.start_s = found.room, found.seconds
        self._start(self._asked.count - len(self._members))

    def _take_beat(self, member: _Member, beat: Beat) -> None:
        member.heard = time.monotonic()
        idle = not (member.tasks or member.starting)
        if member.beat is None or beat.moves != member.beat.moves or idle:
            member.moved = member.heard
        member.beat = beat
        member.beating = member.handle.beat.remote(BEAT_S)

    def _end_hung(self) -> Iterator[tuple[Any, Any]]:
        now = time.monotonic()
        if all(member.beat is None and now - member.heard > PLACE_S for member in self._members):
            asks = f"{self._asked.cpus:g} CPUs and {self._asked.gpus:g} GPUs"
            raise UserError(
                f"Ray found no room for a worker of {asks} within {PLACE_S:.0f} s (ray status)"
            )
        for member in tuple(self._members):
            silent, still = now - member.heard, now - member.moved
            if member.beat is not None and silent > ANSWER_S:
                yield from self._lose(member, f"it does not answer for {silent:.0f} s")
            elif member.tasks and still > MOVE_S:
                why = f"it answers, but its work has not moved for {still:.0f} s"
                yield from self._lose(member, why)
            elif member.starting and member.beat is not None and still > START_S:
                why = f"it answers, but has not started within {still:.0f} s"
                yield from self._lose(member, why)

    def _lose(self, member: _Member, why: str) -> Iterator[tuple[Any, WorkersEnded]]:
        """Ends a worker that hangs or has ended, and starts another. The work of the first one runs
        again."""
        self._ray.kill(member.handle, no_restart=True)
        items = [*member.tasks.values()]
        self.ended += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise UserError(
                f"{self._in_a_row} workers ended one after the other without a result; the last "
                f"was {member.name}: {why}"
            )
        self._warn(f"{member.name} ended: {why}; pieces of work that run again: {len(items)}")
        self._members[self._members.index(member)] = self._new_member()
        for item in items:
            item.ends += 1
            if len(items) == 1 and item.ends >= MOST_ENDS:
                self._in_a_row = 0
                text = f"{item.ends} workers ended while this ran, at last {member.name}: {why}"
                yield item.payload, WorkersEnded(text)
            else:
                self._suspects.append(item)
