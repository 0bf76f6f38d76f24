"""Models on the workers of a cluster, and LLM.generate_each on them."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

from host_offload.memory.budget import format_bytes
from moejax.checkpoints.shared_memory import NoSharedMemory
from moejax.device import select_device
from moejax.errors import UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.cluster.ray_cluster import LOCAL, nodes, own_cpus
from moejax.serve.cluster.workers import Started, Worker, WorkerOptions, Workers
from moejax.serve.llm import LLM
from moejax.start.options import Config, refuse_cache_aware

log = logging.getLogger("moejax")

ROOMS = 4
"""Requests of a worker, by the rows of its steps: what it does while results go one way and new
requests the other."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a model is spread. address: of Ray. workers, cores_per_worker: None: as `worker_options`
    says."""

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
        """CPUs of a Ray of one's own: what its workers ask for, so that more of them than there are
        cores are possible."""
        return max(own_cpus(), (self.workers or 1) * (self.cores_per_worker or 1))


def worker_options(
    kind: type[Worker], model: str, options: Mapping[str, Any], scale: Scale
) -> WorkerOptions:
    """What the workers of a connected cluster are: one a GPU with what its node has of CPUs for
    each, or, where there are no GPUs or the device is "cpu", one a node with all its CPUs, which
    are shared where several are asked for. Raises UserError where no node has room for one, and for
    options that can never be."""
    delta = Config.of(model, **options).policy.cache_aware_routing
    refuse_cache_aware(delta, "workers that share a job out must give the results of one")
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
    return WorkerOptions(kind, (model, given), count, cores, 1.0 if on_gpu else 0.0)


class ModelWorker(Worker):
    """A worker with one LLM."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    async def start(self, model: str, options: Mapping[str, Any]) -> Started | str:
        """Loads the model."""
        try:
            self._llm = await asyncio.to_thread(load_on_worker, model, options)
            seconds = self._llm.stats()["time"]["total_s"]
            return Started(self._begin(self._llm), seconds)
        except (UserError, MemoryError, ValueError) as error:
            return str(error) or type(error).__name__

    @abc.abstractmethod
    def _begin(self, llm: LLM) -> int:
        """Begins to serve with a model that was loaded; returns how much work it should have."""

    def _moves(self) -> float:
        return 0 if self._llm is None else sum(self._llm.engine.statistics.steps.values())

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats`."""
        assert self._llm is not None
        return await asyncio.to_thread(self._llm.stats)

    async def close(self) -> None:
        """Frees the model: the last one of a machine removes shared experts."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


def load_on_worker(model: str, options: Mapping[str, Any]) -> LLM:
    """The LLM. Its experts lie where the workers of this machine share them, unless the options say
    where; with a warning in the log where there is no such memory."""
    given = {name: value for name, value in options.items() if value is not None}
    dense = given.get("precision") in (None, "dense")
    on_cpu = select_device(given.get("device"), given.get("threads")).platform == "cpu"
    if dense and on_cpu and "store" not in given:
        try:
            return LLM(model, progress=False, store="shared", **given)
        except NoSharedMemory as error:
            log.warning("each worker holds the experts for itself: %s", error)
    return LLM(model, progress=False, **given)


class Generator(ModelWorker):
    """A worker whose work is lists of requests, of which those of a session are one."""

    def _begin(self, llm: LLM) -> int:
        self._async = AsyncLLM(llm)
        shapes = llm.engine.runner.shapes
        return ROOMS * shapes.rows + shapes.prefill_chunks

    @property
    def tokens(self) -> int:
        return 0 if self._llm is None else self._llm.generated_tokens

    async def _work(self, item: list[GenerationRequest]) -> list[RequestOutput | UserError]:
        found = [await self._generate(asked) for asked in item]
        session_id = item[0].session_id
        if session_id is not None and any(isinstance(one, RequestOutput) for one in found):
            await self._async.end_session(session_id)
        return found

    async def _generate(self, asked: GenerationRequest) -> RequestOutput | UserError:
        try:
            return [
                output
                async for output in self._async.generate(
                    asked.prompt,
                    asked.sampling_params,
                    session_id=asked.session_id,
                    priority=asked.priority,
                    last_only=True,
                )
            ][-1]
        except UserError as error:
            return UserError(str(error))

    async def stats(self) -> dict[str, Any]:
        return await self._async.stats()

    async def close(self) -> None:
        await self._async.close()
        await super().close()


class Fleet:
    """An LLM on every worker of a connected cluster, for requests in any number; a context manager,
    which ends the workers.

    - `model`, `options`, `scale`: see worker_options.
    - `turns`: session id → its requests that will come. They are run together, by one worker.
    - `warn`: see Workers.

    A request's output has the bits that one LLM with these options gives it, whoever its worker is,
    and however many there are: contract 1.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        scale: Scale,
        turns: Mapping[str, int],
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._workers = Workers(worker_options(Generator, model, options, scale), warn)
        self._turns = dict(turns)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._workers.__exit__(*exception)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all workers."""
        return self._workers.tokens

    def generate_each(
        self, requests: Iterable[GenerationRequest]
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
        """`LLM.generate_each`. A request that ends workers is yielded with a UserError."""
        for item, found in self._workers.run(self._items(requests), _strip_tags):
            yield from zip(item, found if isinstance(found, list) else repeat(found), strict=False)

    def _items(self, requests: Iterable[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """What a worker gets at once: a request, or all of a session."""
        begun: dict[str, list[GenerationRequest]] = {}
        for asked in requests:
            if asked.session_id is None:
                yield [asked]
                continue
            together = begun.setdefault(asked.session_id, [])
            together.append(asked)
            if len(together) == self._turns[asked.session_id]:
                yield begun.pop(asked.session_id)
        yield from begun.values()  # of an input that a bad line ended early

    def end_session(self, session_id: str) -> None:
        """A worker ends a session after its last request."""

    def stats(self) -> dict[str, Any]:
        """`LLM.stats` of each worker that lives, with its place, and how many ended before."""
        return {"workers": self._workers.stats(), "ended_workers": self._workers.ended}


def _strip_tags(item: list[GenerationRequest]) -> list[GenerationRequest]:
    return [dataclasses.replace(asked, tag=None) for asked in item]


def format_fleet(stats: Mapping[str, Any]) -> str:
    """The dict of `Fleet.stats` as aligned lines: a row for each worker, then all together."""
    lines = [
        f"{'worker':<8}{'results':>9}{'tokens/s':>10}{'hits':>7}{'moved':>11}{'start':>9}  host"
    ]
    for worker in stats["workers"]:
        one = worker["stats"]
        hits, moved = one["experts"]["hit_rate"], sum(one["bytes"].values())
        lines.append(
            f"{worker['worker']:<8}{worker['results']:>9}{one['tokens_per_s'] or 0.0:>10.1f}"
            f"{'–' if hits is None else f'{hits:.1%}':>7}{format_bytes(moved):>11}"
            f"{worker['start_s']:>7.2f} s  {worker['host']}"
        )
    ended = f", {stats['ended_workers']} ended before" if stats["ended_workers"] else ""
    tokens = sum(worker["stats"]["generated_tokens"] for worker in stats["workers"])
    lines.append(f"all: {tokens} tokens of {len(stats['workers'])} workers{ended}")
    return "\n".join(lines)
