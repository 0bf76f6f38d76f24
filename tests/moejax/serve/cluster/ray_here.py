"""The part of Ray that workers need, whose workers are objects of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from moejax.serve.cluster.ray_cluster import own_cpus
from moejax.serve.cluster.worker import Worker


class Handle:
    """A worker; calls run in the event loop of its Ray."""

    def __init__(self, ray: RayHere, worker: Worker):
        self._ray, self._worker = ray, worker

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._ray.run(self._call(name, given)))

    async def _call(self, name: str, given: Sequence[Any]) -> Any:
        found = getattr(self._worker, name)(*given)
        return await found if asyncio.iscoroutine(found) else found


class RayHere:
    """Stands for the module ray, with two nodes that have this machine's CPUs: jax has started
    with so many threads."""

    exceptions = SimpleNamespace(RayError=RuntimeError)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def __init__(self) -> None:
        self._places = itertools.cycle("ab")
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

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: next(self._places))

    def remote(self, kind: type[Worker]) -> Any:
        made = SimpleNamespace(remote=lambda: Handle(self, kind()))
        return SimpleNamespace(options=lambda **_: made)

    def wait(self, references: list, num_returns: int, timeout: float) -> tuple[list, list]:
        when = concurrent.futures.FIRST_COMPLETED
        if num_returns > 1:
            when = concurrent.futures.ALL_COMPLETED
        done, rest = concurrent.futures.wait(references, timeout, when)
        return [*done], [*rest]

    def get(self, reference: concurrent.futures.Future, timeout: float | None = None) -> Any:
        return reference.result(timeout)

    def kill(self, handle: Handle, no_restart: bool) -> None:
        """What it was asked for before has ended."""
