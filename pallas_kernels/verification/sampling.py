"""The check of truncate, the kernel of sampling."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.truncate import truncate
from pallas_kernels.verification.check import Check, ModelShape, draw, make_check


def sampling_check(shape: ModelShape) -> Check:
    """Checks truncate with rows that search by mass, by count, by both and not at all. There are
    few distances with many tokens each, so rounding of sums decides nothing and results are
    exact."""
    rows, vocabulary = 4, shape.vocabulary

    def operands():
        logits = draw(0, (rows, vocabulary), "float32", 4.0)
        scaled = jnp.round(logits - jnp.max(logits, axis=1, keepdims=True))
        top_k, top_p = jnp.asarray([0, 20, 20, 0]), jnp.asarray([0.75, 1, 0.75, 1], jnp.float32)
        return scaled, top_k, top_p, jnp.full(rows, 1e-6, jnp.float32)

    def searched(name, scaled, top_k, top_p, min_p):
        return truncate(scaled, top_k, top_p, min_p, implementation=name)

    return make_check("truncate", f"{vocabulary} tokens", "float32", operands, searched)
