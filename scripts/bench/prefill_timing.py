"""Timing prefill steps on a running engine, with its experts resident or all of them missing."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from moejax.engine.loop import Engine
from moejax.engine.step_work import Step
from moejax.requests.sampling_params import SamplingParams
from scripts.parts.bench_engine import grant


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
    paging = jax.device_get(steps[0].output.paging)
    counts = (int(np.sum(n)) for n in (paging.active, paging.fills, paging.read_through))
    return PrefillSample(seconds, *counts)
