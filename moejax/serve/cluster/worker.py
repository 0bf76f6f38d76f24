"""What runs on the machines: an actor of Ray, mostly with one LLM, which is given tasks and asked
for what is done.

Results are taken by whoever drives, in batches: one call of `take` is always under way, so nothing
is polled, and what a worker had when it died is known to be what was put and not taken.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.checkpoints.shared_memory import NoSharedMemory
from moejax.device import select_device
from moejax.errors import UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.cluster.ray_cluster import require_ray
from moejax.serve.engine_thread import EngineDeadError
from moejax.serve.llm import LLM

log = logging.getLogger("moejax")

BEAT_S = 1.0
"""How long `take` waits for a result before it says how far things are."""

GATHER_S = 0.1
"""How long it then waits for more of them: a call costs a few milliseconds, here and where it goes
to."""

ROOMS = 4
"""Requests of a worker, by the rows of its steps: what it does while results go one way and new
requests the other."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    task: int
    value: Any = None
    error: str | None = None
    """What is wrong with the task; the worker is as good as before."""
    broken: str | None = None
    """What is wrong with the worker, which can do nothing more."""
    part: bool = False
    """It is a piece of the task's result, which goes on."""


@dataclasses.dataclass(frozen=True)
class Started:
    """A worker that can be given tasks."""

    room: int
    """Tasks that it should have at once."""
    start_s: float


@dataclasses.dataclass(frozen=True)
class WorkerPlace:
    """Where a worker is."""

    node: str
    address: str
    pid: int
    host: str


class Worker(abc.ABC):
    """An actor. Made remote by the pool; Ray's dashboard shows it by its name."""

    def __init__(self) -> None:
        self._done: list[Outcome] = []
        self._news = asyncio.Event()
        self._running: set[asyncio.Task] = set()

    def where(self) -> WorkerPlace:
        """Answered before anything can go wrong."""
        ray = require_ray()
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return WorkerPlace(context.get_node_id(), address, os.getpid(), platform.node())

    @abc.abstractmethod
    async def start(self, model: str, options: Mapping[str, Any]) -> Started | str:
        """Makes it ready for tasks; what is wrong with it here, as text."""

    async def put(self, tasks: Sequence[tuple[int, Any]]) -> None:
        """Begins tasks, in their order."""
        for number, payload in tasks:
            running = asyncio.get_running_loop().create_task(self._carry_out(number, payload))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def take(self) -> tuple[list[Outcome], int]:
        """(what was done since the last call, tokens generated or scored so far)."""
        try:
            await asyncio.wait_for(self._news.wait(), BEAT_S)
            await asyncio.sleep(GATHER_S)
        except TimeoutError:
            pass
        self._news.clear()
        done, self._done = self._done, []
        return done, self._tokens()

    async def _carry_out(self, number: int, payload: Any) -> None:
        try:
            outcome = Outcome(number, value=await self._work(number, payload))
        except UserError as error:
            outcome = Outcome(number, error=str(error))
        except EngineDeadError as error:
            outcome = Outcome(number, broken=str(error))
        except Exception as error:
            outcome = Outcome(number, broken=f"{type(error).__name__}: {error}")
        self._say(outcome)

    def _say(self, outcome: Outcome) -> None:
        """Hands it to the next `take`. Called in the event loop's thread."""
        self._done.append(outcome)
        self._news.set()

    @abc.abstractmethod
    async def _work(self, number: int, payload: Any) -> Any:
        """The result of a task, whose number is for pieces of it. Raises UserError for what is
        wrong with it; whatever else is raised is wrong with the worker."""

    def _tokens(self) -> int:
        return 0

    async def stats(self) -> dict[str, Any]:
        """What it says of itself."""
        return {}

    async def close(self) -> None:
        """Gives up what would outlive the process, which is ended then."""
        return


class ModelWorker(Worker):
    """A worker with one LLM."""

    def __init__(self) -> None:
        super().__init__()
        self._llm: LLM | None = None

    async def start(self, model: str, options: Mapping[str, Any]) -> Started | str:
        """Loads the model."""
        try:
            self._llm = await asyncio.to_thread(_started, model, options)
            return self._begin(self._llm)
        except (UserError, MemoryError, ValueError) as error:
            return str(error) or type(error).__name__

    @abc.abstractmethod
    def _begin(self, llm: LLM) -> Started:
        """Begins to serve with a model that was loaded."""

    def _tokens(self) -> int:
        return 0 if self._llm is None else self._llm.generated_tokens

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats`."""
        assert self._llm is not None
        return await asyncio.to_thread(self._llm.stats)

    async def close(self) -> None:
        """Frees the model: the last one of a machine removes shared experts."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


def _started(model: str, options: Mapping[str, Any]) -> LLM:
    """The LLM. Its experts lie where the workers of this machine share them, unless the options say
    where; with a warning in the log where there is no such memory."""
    given = dict(options)
    if given.pop("store", None) is not None:
        return LLM(model, progress=False, **options)
    dense = given.get("precision") in (None, "dense") and not ({"hi", "lo"} & given.keys())
    if dense and select_device(given.get("device"), given.get("threads")).platform == "cpu":
        try:
            return LLM(model, progress=False, store="shared", **given)
        except NoSharedMemory as error:
            log.warning("each worker holds the experts for itself: %s", error)
    return LLM(model, progress=False, **given)


class Generator(ModelWorker):
    """A worker whose tasks are requests and whose results are outputs."""

    def _begin(self, llm: LLM) -> Started:
        shapes, start_s = llm.engine.runner.shapes, llm.stats()["time"]["total_s"]
        self._async = AsyncLLM(llm)
        return Started(ROOMS * shapes.rows + shapes.prefill_chunks, start_s)

    async def _work(self, number: int, payload: GenerationRequest) -> RequestOutput:
        last = None
        async for output in self._async.generate(
            payload.prompt,
            payload.sampling_params,
            session_id=payload.session_id,
            priority=payload.priority,
            last_only=True,
        ):
            last = output
        assert last is not None
        return last

    async def end_session(self, session_id: str) -> None:
        await self._async.end_session(session_id)

    async def stats(self) -> dict[str, Any]:
        return await self._async.stats()

    async def close(self) -> None:
        await self._async.close()
        await super().close()
