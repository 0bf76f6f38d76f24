"""Measures the machine's rates, from which floors and cost models are computed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.step.executor import Executor
from pallas_kernels.fill import Fills, fill

QUEUED = {"cpu": 1}
"""Calls dispatched before waiting for the last one, by platform; 8 on all others, so that the
device never waits for Python."""

LEAST_S = 0.3
"""Seconds of repeated rounds."""

READ = {"cpu": 1 << 28}
"""Bytes of the array on which the memory's rate is measured, by platform; 1 GiB on all others."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second, measured or stated."""

    link: float
    """The link from host memory, one direction."""
    memory: float
    """The device's memory."""


def measure_rates(runner: Executor) -> Rates:
    """Returns the link's rate (the runner's own fill op, on its store) and the device memory's.

    It takes up to 1 GiB of device memory beside the arena while it runs.
    """
    return Rates(measure_link_rate(runner), measure_memory_rate(runner.device))


def measure_link_rate(runner: Executor) -> float:
    """Returns the bytes per second that the runner's own fill op moves from its store."""
    layers, experts, rows, hidden = runner.stores[0].shape
    record = rows * hidden * 2
    # Enough bytes to leave every cache behind, little enough to be an addition to the arena.
    count = int(np.clip((256 << 20) // record, 1, experts))
    arena = jax.device_put(np.zeros((count * rows, hidden), np.uint16), runner.buffers.sharding)
    index = np.arange(count, dtype=np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def move(arena, stores, layer):
        version = jnp.zeros(count, jnp.int32)  # the first, the dense one
        fills = Fills(jnp.asarray(index), jnp.asarray(index * rows), version, jnp.int32(count))
        return fill(arena, stores, layer, fills, implementation=runner.ops.fill)

    def fill_layer(i: int, arena: jax.Array) -> jax.Array:
        return move(arena, runner.stores, np.int32(i % layers))

    return count * record / best_s(fill_layer, runner.device, arena)


@functools.cache  # every engine of a process has the same memory
def measure_memory_rate(device: jax.Device) -> float:
    """Returns the bytes per second that the device reads from its memory. A copy may move more,
    where memory reads and writes at once, but steps read."""
    values = jax.device_put(np.ones(READ.get(device.platform, 1 << 30) // 4, np.float32), device)
    total = jax.jit(jnp.sum)
    return values.nbytes / best_s(lambda *_: total(values), device)


def best_s(
    work: Callable[[int, Any], jax.Array], device: jax.Device, result: jax.Array | None = None
) -> float:
    """Returns the seconds of one call of work(i, previous result): the fastest of repeated rounds
    of QUEUED calls, dispatched one after the other. The fastest round counts since a floor is what
    the machine can do.

    - `result`: the result before the first call; a call may donate it.
    """
    calls = QUEUED.get(device.platform, 8)
    result = jax.block_until_ready(work(0, result))
    best, i = float("inf"), 1
    began = time.perf_counter()
    while i < 1 + 3 * calls or time.perf_counter() - began < LEAST_S:
        start = time.perf_counter()
        for _ in range(calls):
            result, i = work(i, result), i + 1
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / calls)
    return best
