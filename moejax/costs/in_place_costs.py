"""What an expert takes where its weights are: C and β of PreScope's t_c(m) = β·m + C, equation (3),
of the op that a second processor runs."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moejax.step.context import ExpertContext
from moejax.step.experts import compute_in_place

EXPERTS, ROWS, REPEATS = 8, (1, 2, 4, 8, 16, 32, 64), 15
"""Experts of a call, rows of each, and timed calls."""


def in_place_costs(
    stores: tuple[jax.Array, ...], context: ExpertContext, dtype: DTypeLike
) -> np.ndarray:
    """float64[2]: C and β in seconds, by least squares over in_place_seconds, neither below 0."""
    seconds = in_place_seconds(stores, context, dtype)
    slope, start = np.polyfit(ROWS, seconds, 1)
    if slope < 0 or start < 0:  # noise, or a cost that is all of one kind
        rows = np.array(ROWS)
        return np.array([0.0, float(rows @ seconds / (rows @ rows))])
    return np.array([start, slope])


def in_place_seconds(
    stores: tuple[jax.Array, ...], context: ExpertContext, dtype: DTypeLike
) -> np.ndarray:
    """float64[len(ROWS)]: seconds of an expert of so many rows, read where it is in uint16
    [L, E, rows, D], on context.threads. Of a call of several experts less one of a single one: what
    a call takes by itself is a layer's, not an expert's."""
    layers, experts, _, hidden = stores[0].shape
    most = min(EXPERTS, experts)

    @jax.jit
    def compute(stores, x, ids, layer, listed, count):
        given = dataclasses.replace(context, stores=stores)
        return compute_in_place(x, ids, (layers, experts), layer, listed, count, given)

    listed = np.full(experts, -1, np.int32)
    listed[:most] = np.arange(most)
    each = []
    for rows in ROWS:
        ids = np.repeat(np.arange(most, dtype=np.int32), rows)[:, None]
        x = jnp.full((len(ids), hidden), 0.01, dtype)
        taken: dict[int, list[float]] = {count: [] for count in (1, most)}
        for repeat in range(REPEATS + 1):
            for count, found in taken.items():
                layer = np.int32(repeat % layers)  # so that weights come from memory
                began = time.perf_counter()
                compute(stores, x, ids, layer, listed, np.int32(count)).block_until_ready()
                found.append(time.perf_counter() - began)
        one, several = (float(np.median(found[1:])) for found in taken.values())
        each.append(max(several - one, 0.0) / max(most - 1, 1))
    return np.array(each)
