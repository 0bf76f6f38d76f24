"""Table 2 of the whole model, predicted: what the command `table2` cannot run without a large
GPU.

A step takes what the paper's row with every expert resident says, and for each miss an expert's
bytes over a stated link. Nothing here is measured.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from host_offload.sizing.miss_curves import CurveCounts
from host_offload.traces.generators import KINDS, routing_generator
from moejax.checkpoints.random_model import shape

PUBLISHED = {16: (8.96, 13.79), 32: (10.27, 18.51), 64: (13.21, 25.75), 128: (26.53, 26.79)}
"""Cells of a layer → tokens a second of the paper's offload baseline and of WiSP (its Table 2)."""

PUBLISHED_SHAPE = "qwen3-30b-a3b"

PREDICTED_STEPS = 512
"""Steps of the curve for the whole model; as many before them only fill the recency lists."""


def whole_model(
    cells: int, *, shape_name: str, batch: int, routing: str, link_gb_per_s: float, seed: int
) -> dict[str, Any] | None:
    """The row of so many cells a layer, tokens a second, beside what is published; None where
    nothing is, or the routing is the model's own.

    paged: LRU, misses by the curve. link_alone: paged, if computing took no time (None: nothing
    moves). static: of layers that are not resident every step reads the active experts. streamed:
    it reads all of their experts.
    """
    published = PUBLISHED.get(cells)
    if shape_name != PUBLISHED_SHAPE or batch != 1 or published is None:
        return None
    if routing not in KINDS:
        return None
    config = shape(PUBLISHED_SHAPE)
    layers, experts, k = len(config.moe_layers), config.num_experts, config.num_experts_per_tok
    curve = whole_curve(routing, layers, experts, k, seed)
    expert_s = config.expert_layout(2).nbytes / (link_gb_per_s * 1e9)
    step_s = 1 / PUBLISHED[experts][1]
    away = layers - cells * layers / experts  # layers that static keeps on the host
    rates = {
        name: 1 / (step_s + moved * expert_s)
        for name, moved in (
            ("paged", float(curve[cells])),
            ("static", away * k),
            ("streamed", away * experts),
        )
    }
    return {
        "link_gb_per_s": link_gb_per_s,
        "misses": float(curve[cells]),
        "link_alone_tokens_per_s": 1 / (curve[cells] * expert_s) if curve[cells] else None,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        "published": published,
    }


@functools.cache
def whole_curve(kind: str, layers: int, experts: int, k: int, seed: int) -> np.ndarray:
    """float64[E + 1]: misses of a step by cells, of one sequence, first sights left out."""
    counts = CurveCounts(layers, experts)
    steps = routing_generator(kind, layers, experts, k).steps(1, 2 * PREDICTED_STEPS, seed=seed)
    for number, step in enumerate(steps):
        active = np.zeros((layers, experts), bool)
        np.put_along_axis(active, step.ids[0].astype(np.int64), True, axis=1)
        timed = number >= PREDICTED_STEPS
        counts.add(active, counted=timed)
        if timed:
            counts.end_step()
    curves = counts.curves()
    return curves.warm.sum(axis=0) / curves.steps
