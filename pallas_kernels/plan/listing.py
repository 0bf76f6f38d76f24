"""Lists from masks, for kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def places(mask: jax.Array) -> jax.Array:
    """The permutation int32[N] that moves the elements under mask, bool[N], to the front and all
    others behind them, both in their order."""
    before = jnp.cumsum(mask.astype(jnp.int32))
    index = jnp.arange(mask.shape[0])
    return jnp.where(mask, before - 1, count(mask) + index - before)


def count(mask: jax.Array) -> jax.Array:
    """int32[]: how many elements are true."""
    return jnp.sum(mask.astype(jnp.int32))
