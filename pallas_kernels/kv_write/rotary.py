"""Rotary embedding (RoFormer, section 3.4.2) as transformers computes it."""

import jax.numpy as jnp


def cosine_and_sine(positions, inverse_frequencies, factor, dtype):
    """Cosine and sine of every token's angles, each [T, 1, half], scaled by `factor`. Angles are in
    float32."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies
    cos, sin = ((fn(angles) * factor).astype(dtype)[:, None] for fn in (jnp.cos, jnp.sin))
    return cos, sin


def rotate(x, cos, sin):
    """Rotates x [T, H, 2·half] by the angles, value i together with value half + i."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
