"""The record of a layer in a step, one row of int32: routing, and counts of hits and misses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

TOTALS = 4
"""Counts of a layer: active experts, hits, fills, experts read through."""


def counts_size(experts: int, versions: int = 1) -> int:
    """int32 values of one layer's counts: TOTALS, one bit an expert, and, with several versions,
    the fills and read-throughs of each."""
    return TOTALS + -(-experts // 32) + (2 * versions if versions > 1 else 0)


def record_size(pairs: int, experts: int, versions: int = 1) -> int:
    """int32 values of a layer's record: an id and a weight for each (token, choice), the counts."""
    return 2 * pairs + counts_size(experts, versions)


def record(ids: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
    """Joins int32 ids, as many float32 weights, and counts to int32[record_size]. One array, since
    every array that a step returns costs a kernel or a copy."""
    weights = lax.bitcast_convert_type(weights, jnp.int32)
    return jnp.concatenate((ids.reshape(-1), weights.reshape(-1), counts))


def active_experts(ids: jax.Array, among: jax.Array) -> jax.Array:
    """bool[E]: experts of `among` that some token is routed to. ids: int32, E for padding."""
    # Along the pairs: across them a GPU needs two kernels from 64 rows on.
    routed = jnp.arange(among.shape[0])[:, None] == ids.reshape(-1)
    return jnp.any(routed & among[:, None], axis=1)


def bits(mask: jax.Array) -> jax.Array:
    """Packs mask bool[E] into int32[⌈E/32⌉], a bit for each expert."""
    halves = jnp.pad(mask, (0, -mask.shape[0] % 32)).reshape(-1, 2, 16)
    # On a GPU XLA makes a separate kernel of a sum over a power of two, but fuses a sum over 17
    # into the kernel that stores it.
    halves = jnp.pad(halves, ((0, 0), (0, 0), (0, 1)))
    bit = jnp.uint32(1) << jnp.arange(17, dtype=jnp.uint32)
    halves = jnp.sum(jnp.where(halves, bit, jnp.uint32(0)), axis=2, dtype=jnp.uint32)
    return lax.bitcast_convert_type(halves[:, 0] | halves[:, 1] << 16, jnp.int32)
