import jax.numpy as jnp
from jax import lax


def rms_norm(x, weights, layer, eps):
    weight = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)
