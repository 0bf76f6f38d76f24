"""Measures the time of an expert on a CPU that has its weights: C and β of PreScope's t_c(m) = β·m
+ C, equation (3)."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.sizing.cost_model import fit_costs
from moejax.step.executor import Executor
from moejax.step.experts import compute, zero_outputs
from moejax.step.programs import ProgramKey
from pallas_kernels.expert_ffn import ExpertBatch, ExpertPlaces

EXPERTS, ROWS, REPEATS = 8, (1, 2, 4, 8, 16, 32, 64), 15
"""Experts of a call, rows of each expert, and number of timed calls."""


def cpu_expert_costs(runner: Executor) -> tuple[float, float] | None:
    """Returns C and β in seconds, neither below 0. If the runner's own experts run on a CPU,
    measures their op, else XLA's products on jax's CPU. Returns None if jax has no CPU."""
    if runner.steps.ops.expert_ffn == "cpu":
        seconds = _in_place_seconds(runner)
    else:
        try:
            seconds = _xla_seconds(runner, jax.devices("cpu")[0])
        except RuntimeError:  # JAX_PLATFORMS names another one only
            return None
    start, per_row = fit_costs([[1, rows] for rows in ROWS], seconds)
    return start, per_row


def _in_place_seconds(runner: Executor) -> list[float]:
    """Returns the seconds of one expert for each of ROWS, read in place: a call of several experts
    minus a call of one. The fixed time of a call belongs to a layer, not to an expert."""
    context = runner.programs().context(ProgramKey("decode"))
    layers, experts, _, hidden = runner.stores[0].shape
    most = min(EXPERTS, experts)

    @jax.jit
    def compute_in_place(stores, x, ids, layer, listed, count):
        y, nowhere = zero_outputs(ids.size, hidden), jnp.zeros((1, hidden), jnp.uint16)
        absent = jnp.full((layers, experts), -1, jnp.int32)
        batch = ExpertBatch(listed, count, ids, x)
        places = ExpertPlaces(stores, layer, absent, jnp.zeros_like(absent))
        return compute(y, nowhere, batch, places, dataclasses.replace(context, stores=stores))

    listed = np.full(experts, -1, np.int32)
    listed[:most] = np.arange(most)
    found = []
    for rows in ROWS:
        ids = np.repeat(np.arange(most, dtype=np.int32), rows)[:, None]
        x = jnp.full((len(ids), hidden), 0.01, _dtype(runner))

        def call(repeat: int, count: int, x=x, ids=ids) -> jax.Array:
            layer = np.int32(repeat % layers)  # so that weights come from memory
            return compute_in_place(runner.stores, x, ids, layer, listed, np.int32(count))

        several, one = (median_s(functools.partial(call, count=count)) for count in (most, 1))
        found.append(max(several - one, 0.0) / max(most - 1, 1))
    return found


def _xla_seconds(runner: Executor, device: jax.Device) -> list[float]:
    """Returns the seconds of one expert's three products for each of ROWS."""
    hidden, width = runner.config.expert_hidden, runner.config.moe_intermediate_size
    weights = jax.device_put(np.full((3, width, hidden), 0.01, _dtype(runner)), device)

    @jax.jit
    def compute(x, weights):
        return (jax.nn.silu(x @ weights[0].T) * (x @ weights[1].T)) @ weights[2]

    inputs = (jax.device_put(jnp.ones((rows, hidden), _dtype(runner)), device) for rows in ROWS)
    return [median_s(lambda _, x=x: compute(x, weights)) for x in inputs]


def _dtype(runner: Executor) -> np.dtype:
    return runner.params["embed"].dtype


def median_s(call: Callable[[int], jax.Array]) -> float:
    """Returns the median seconds until a call's result is ready, without the first call."""
    found = []
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(call(repeat))
        found.append(time.perf_counter() - began)
    return float(np.median(found[1:]))
