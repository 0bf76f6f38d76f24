from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

INFINITY_BITS = 0x7F800000


def truncate(scaled, top_k, top_p, min_p):
    vocabulary = scaled.shape[-1]
    # The bits of a non-negative float32 sort like the float.
    distance = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    mass = jnp.exp(scaled)
    keep = mass >= min_p[:, None]

    k = jnp.where(top_k <= 0, vocabulary, jnp.minimum(top_k, vocabulary))
    by_k = jnp.minimum(farthest(distance, keep, k), INFINITY_BITS)
    by_k = jnp.where((top_k <= 0)[:, None], INFINITY_BITS, by_k)

    mass = jnp.where(keep & (distance <= by_k), mass, 0.0)
    by_p = farthest(distance, mass, top_p * _row_sum(mass))
    # At top_p = 1 rounding must not drop tokens that are too small to change the sum.
    return jnp.where(top_p >= 1, by_k[:, 0], jnp.minimum(by_k, by_p)[:, 0])


def farthest(distance: Array, amount: Array, target: Array) -> Array:
    """The smallest d of each row such that the amounts of tokens up to distance d reach the target.
    The search is over bits of floats, so it is exact, and replaces a sort of the vocabulary.

    - `distance`: int32 ``[R, V]``, bits of floats that are not negative.
    - `amount`: bool ``[R, V]``, counted, or float32 that is not negative.
    - `target`: ``[R]``, int32 or float32 like the sums.

    Returns int32 ``[R, 1]``, above the bits of infinity if all amounts together are less.
    """
    by_platform = {"cuda": by_sixteenths, "default": by_halves}
    return lax.platform_dependent(distance, amount, target, **by_platform)


def by_halves(distance: Array, amount: Array, target: Array) -> Array:
    """`farthest` in 31 passes that compare each value with one bound: the least work."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2  # low + high would overflow
        found = _row_sum(_up_to(distance, amount, middle)) >= target
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    low = jnp.zeros(distance.shape[0], jnp.int32)
    # 31 halvings cover 0 … the bits of infinity.
    low, _ = lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, INFINITY_BITS)))
    return low[:, None]


def by_sixteenths(distance: Array, amount: Array, target: Array) -> Array:
    """`farthest` in 8 passes that compare each value with 15 bounds, 7 in the first: the fewest
    launches. XLA makes three launches of a pass, so a search is 24 launches instead of 186."""
    low, left = jnp.zeros(distance.shape[0], jnp.int32), 31
    for bits in (3, *[4] * 7):
        left -= bits
        bounds = [low + (((n + 1) << left) - 1) for n in range(2**bits - 1)]
        parts = [_up_to(distance, amount, bound) for bound in bounds]
        # One reduction for all bounds: XLA does not merge that many reductions into one kernel.
        sums = lax.reduce(
            parts,
            [jnp.zeros((), part.dtype) for part in parts],
            lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
            (1,),
        )
        low += sum((total < target).astype(jnp.int32) for total in sums) << left
    return jnp.minimum(low, INFINITY_BITS + 1)[:, None]


def _up_to(distance: Array, amount: Array, bound: Array) -> Array:
    """``[R, V]`` in the sums' dtype: the amounts of tokens up to distance `bound`, int32
    ``[R]``."""
    near = distance <= bound[:, None]
    return (
        (near & amount).astype(jnp.int32) if amount.dtype == bool else jnp.where(near, amount, 0.0)
    )


def _row_sum(values: Array) -> Array:
    """Row sums ``[R, V] -> [R]`` in one fixed order, so that they are monotone in every value."""
    return jnp.sum(values, axis=-1)
