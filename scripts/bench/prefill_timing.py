"""Timing prefill steps on a running engine, with its experts resident or all of them missing, and
the matrix products that are their floor."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from moejax.costs.rates import best_s
from moejax.engine.loop import Engine
from moejax.engine.step_work import Step
from moejax.requests.sampling_params import SamplingParams
from scripts.parts.bench_engine import grant

SQUARE = {"cpu": 1024}
"""Platform → rows and columns of the matrices in measure_matrix_rate; elsewhere 8192."""


@dataclasses.dataclass(frozen=True)
class PrefillSample:
    """One prefill step. active, fills, read_through: experts of all layers together."""

    seconds: float
    active: int
    fills: int
    read_through: int


def prefill_steps(
    engine: Engine, prompts: list[list[int]], cells: int, repeats: int
) -> list[PrefillSample]:
    """Prefill steps that find all experts they need (as many cells as experts) or none."""
    resident = cells == engine.runner.config.num_experts
    if resident:
        grant(engine, cells)
        prefill(engine, prompts)
    samples = []
    for _ in range(repeats):
        if not resident:
            grant(engine, 0)
            grant(engine, cells)
        jax.block_until_ready(engine.runner.tables)
        samples.append(prefill(engine, prompts))
    return samples


def prefill(engine: Engine, prompts: list[list[int]]) -> PrefillSample:
    """Runs the prompts through an idle engine, up to their first tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    steps: list[Step] = []
    engine.listener = steps.append
    for prompt in prompts:
        engine.add(prompt, params)
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds, engine.listener = time.perf_counter() - began, None
    if len(steps) != 1:
        raise RuntimeError(f"the prompts took {len(steps)} steps instead of one prefill step")
    paging = steps[0].output.paging
    counts = (int(np.sum(n)) for n in (paging.active, paging.fills, paging.read_through))
    return PrefillSample(seconds, *counts)


def measure_matrix_rate(device: jax.Device, dtype: jax.typing.DTypeLike) -> float:
    """Floating point operations per second of a large square product by XLA, 2·n³ for n rows."""
    n = SQUARE.get(device.platform, 8192)
    a = jax.device_put(np.full((n, n), 0.5, dtype), device)
    product = jax.jit(jnp.matmul)
    rate = 2 * n**3 / best_s(lambda *_: product(a, a), device)
    a.delete()
    return rate
