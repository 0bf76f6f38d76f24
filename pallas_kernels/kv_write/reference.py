import jax.numpy as jnp
from jax import lax

from pallas_kernels.rms_norm.reference import rms_norm


def kv_write(
    qkv,
    q_norm,
    k_norm,
    stack_layer,
    positions,
    inverse_frequencies,
    arena,
    pages,
    layer,
    *,
    page,
    attention_factor,
    eps,
):
    tokens = qkv.shape[0]
    by_head = qkv.reshape(tokens, -1, page.head_dim)
    heads = by_head.shape[1] - page.rows_per_token
    q, k, v = jnp.split(by_head, (heads, heads + page.kv_heads), axis=1)

    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies
    cos = (jnp.cos(angles) * attention_factor).astype(qkv.dtype)[:, None]
    sin = (jnp.sin(angles) * attention_factor).astype(qkv.dtype)[:, None]
    q = _rotate(rms_norm(q, q_norm, stack_layer, eps), cos, sin)
    k = _rotate(rms_norm(k, k_norm, stack_layer, eps), cos, sin)

    bits = lax.bitcast_convert_type(jnp.concatenate([k, v], axis=1), jnp.uint16)
    bits = bits.reshape(tokens, page.rows_per_token, -1)
    view = arena.reshape(-1, bits.shape[-1])
    row = pages + layer * page.rows_per_layer + positions % page.block_size * page.rows_per_token
    row = jnp.where(pages >= 0, row, view.shape[0])
    # Two tokens never share a page row, and padding is dropped.
    rows = row[:, None] + jnp.arange(page.rows_per_token)
    view = view.at[rows].set(bits, mode="drop", unique_indices=True)
    return q, view.reshape(arena.shape)


def _rotate(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
