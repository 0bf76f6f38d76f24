import jax
import jax.numpy as jnp
from jax import lax


def route(logits, valid, *, top_k, normalize):
    experts = logits.shape[-1]
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = lax.top_k(probabilities, top_k)
    # [T, K, K] comparisons instead of a sort: K is small, and a kernel can do the same.
    rank = jnp.sum(ids[:, :, None] > ids[:, None, :], axis=-1)
    place = rank[:, :, None] == jnp.arange(top_k)
    ids = jnp.sum(jnp.where(place, ids[:, :, None], 0), axis=1)
    weights = jnp.sum(jnp.where(place, weights[:, :, None], 0.0), axis=1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    ids = jnp.where(valid[:, None], ids, experts).astype(jnp.int32)
    return ids, jnp.where(valid[:, None], weights, 0.0)
