import jax.numpy as jnp
from jax import lax


def rms_norm(x, weights, layer, eps):
    weight = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def tile_squares(x, tile):
    wide = x.astype(jnp.float32)
    wide = jnp.pad(wide * wide, ((0, 0), (0, -x.shape[1] % tile)))
    sums = wide.reshape(len(x), -1, tile)
    while sums.shape[-1] > 1:  # explicit sums of two: a reduction leaves the order to the compiler
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums[..., 0]
