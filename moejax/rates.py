"""What the machine can do: the rates that floors and cost models are computed from."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.layout import DENSE
from moejax.runner import Runner
from pallas_kernels.fill import fill


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second, measured in this run."""

    link: float
    memory: float


def measure_rates(runner: Runner) -> Rates:
    """The link's rate (the fill op on the runner's store) and the device memory's read rate."""
    layers, experts, rows, hidden = runner.stores[0].shape
    record = rows * hidden * 2
    # Enough bytes to leave every cache behind, little enough to be an addition to the arena.
    count = int(np.clip((256 << 20) // record, 1, experts))
    sharding = runner.tokens.sharding
    arena = jax.device_put(np.zeros((count * rows, hidden), np.uint16), sharding)
    index = np.arange(count, dtype=np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def move(arena, stores, layer):
        return fill(
            arena,
            stores,
            layer,
            jnp.asarray(index),
            jnp.asarray(index * rows),
            jnp.full(count, DENSE, jnp.int32),
            jnp.int32(count),
            implementation=runner.ops.fill,
        )

    def fill_layer(i: int) -> None:
        nonlocal arena
        arena = jax.block_until_ready(move(arena, runner.stores, np.int32(i % layers)))

    values = jax.device_put(np.ones(64 << 20, np.float32), sharding)
    total = jax.jit(jnp.sum)
    link = count * record / _best_s(fill_layer)
    memory = values.nbytes / _best_s(lambda _: jax.block_until_ready(total(values)))
    return Rates(link, memory)


def _best_s(work: Callable[[int], object], least_s: float = 0.3) -> float:
    """The fastest of repeated calls: a floor is what the machine can do, not what it does."""
    work(0)
    best, began, i = float("inf"), time.perf_counter(), 1
    while i < 4 or time.perf_counter() - began < least_s:
        start = time.perf_counter()
        work(i)
        best, i = min(best, time.perf_counter() - start), i + 1
    return best
