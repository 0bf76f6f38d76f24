"""The part of Ray that workers need, whose workers are objects of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from moejax.errors import UserError
from moejax.serve.cluster.ray_cluster import own_cpus
from moejax.serve.cluster.workers import Worker

END = object()


class RayError(Exception):
    """The base of what Ray raises."""


class RayTaskError(RayError):
    """A Python error in a task."""


class Stream:
    """What a task yields, as Ray's generators of references."""

    def __init__(self, ray: RayHere, found: Iterator[Any]):
        self._ray, self._found = ray, found
        self.future = ray.run(self._advance())

    async def _advance(self) -> Any:
        return await asyncio.to_thread(next, self._found, END)

    def __next__(self) -> concurrent.futures.Future:
        here = self.future
        if here.exception() is None:
            if here.result() is END:
                raise StopIteration
            self.future = self._ray.run(self._advance())
        return here


class Handle:
    """A worker; calls run in the event loop of its Ray."""

    def __init__(self, ray: RayHere, worker: Worker, options: dict[str, Any]):
        self._ray, self.worker, self.options, self.killed = ray, worker, options, False
        self.calls: list[concurrent.futures.Future] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(name, given))

    def _call(self, name: str, given: Sequence[Any]) -> Any:
        self.calls.append(self._ray.run(getattr(self.worker, name)(*given)))
        return self.calls[-1]


class RayHere:
    """Stands for the module ray, with two nodes that have this machine's CPUs: jax has started
    with so many threads."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node, soft: node
        )
    )

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self._loop = asyncio.new_event_loop()
        # What processes do at once: one import of transformers must not meet another.
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        cpus = {"CPU": float(own_cpus())}
        node = {"NodeManagerAddress": "127.0.0.1", "Resources": cpus, "Alive": True}
        return [{"NodeID": name, **node} for name in ("a", "b")]

    def remote(self, kind: type[Worker] | None = None, **options_of_task: Any) -> Any:
        """A kind of worker; or, with options, what makes a task of a generator function."""
        if kind is None:
            return lambda function: SimpleNamespace(
                remote=lambda *arguments: Stream(self, function(*arguments))
            )

        def options(**given: Any) -> Any:
            def make() -> Handle:
                self.handles.append(Handle(self, kind(), given))
                return self.handles[-1]

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def wait(self, references: list, num_returns: int, timeout: float) -> tuple[list, list]:
        when = concurrent.futures.FIRST_COMPLETED
        if num_returns > 1:
            when = concurrent.futures.ALL_COMPLETED
        futures = [getattr(one, "future", one) for one in references]
        concurrent.futures.wait(futures, timeout, when)
        done = [one for one, future in zip(references, futures, strict=True) if future.done()]
        return done, [one for one in references if one not in done]

    def get(self, reference: concurrent.futures.Future, timeout: float | None = None) -> Any:
        try:
            return reference.result(timeout)
        except UserError:
            raise
        except Exception as error:
            raise RayError(str(error)) from error

    def kill(self, handle: Handle, no_restart: bool) -> None:
        """Also a start that goes on ends: nothing of the worker is left to other tests."""
        handle.killed = True
        for call in handle.calls:
            call.cancel()
