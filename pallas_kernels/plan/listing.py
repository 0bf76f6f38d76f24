"""Lists out of masks, for kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def places(mask: jax.Array) -> jax.Array:
    """int32[N], a permutation: where each element of mask bool[N] goes when those under the mask
    are moved to the front and every other behind them, both in their order."""
    before = jnp.cumsum(mask.astype(jnp.int32))
    index = jnp.arange(mask.shape[0])
    return jnp.where(mask, before - 1, count(mask) + index - before)


def count(mask: jax.Array) -> jax.Array:
    """int32[]: how many are true."""
    return jnp.sum(mask.astype(jnp.int32))
