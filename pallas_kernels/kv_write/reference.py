import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_write.rotary import cosine_and_sine, rotate
from pallas_kernels.rms_norm.reference import rms_norm


def kv_write(heads, arena, places, options):
    qkv, q_norm, k_norm, stack_layer, inverse_frequencies = heads
    page, eps = options.page, options.eps
    by_head = qkv.reshape(qkv.shape[0], -1, page.head_dim)
    queries = by_head.shape[1] - 2 * page.kv_heads
    q, k, v = jnp.split(by_head, (queries, queries + page.kv_heads), axis=1)

    cos, sin = cosine_and_sine(
        places.positions, inverse_frequencies, options.attention_factor, qkv.dtype
    )
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, stack_layer, eps), rms_norm(k, k_norm, stack_layer, eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, write_rows(arena, jnp.concatenate([k, v], axis=1), places, page)


def write_rows(arena, values, places, page):
    """Writes the tokens' KV rows, values [T, rows_per_token, hd], to their pages in the arena."""
    tokens, (positions, pages, layer) = values.shape[0], places
    bits = lax.bitcast_convert_type(values, jnp.uint16).reshape(tokens, page.rows_per_token, -1)
    view = arena.reshape(-1, bits.shape[-1])
    row = pages + layer * page.rows_per_layer + positions % page.block_size
    row = jnp.where(pages >= 0, row, view.shape[0])
    # Two tokens never share a page row, and padding is dropped.
    rows = row[:, None] + jnp.arange(page.rows_per_token) * page.block_size
    view = view.at[rows].set(bits, mode="drop", unique_indices=True)
    return view.reshape(arena.shape)
