import jax.numpy as jnp
from jax import lax


def layer_norm(x, weights, biases, layer, eps):
    weight, bias = (
        lax.dynamic_index_in_dim(stack, layer, keepdims=False).astype(jnp.float32)
        for stack in (weights, biases)
    )
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return (centered * scale * weight + bias).astype(x.dtype)
