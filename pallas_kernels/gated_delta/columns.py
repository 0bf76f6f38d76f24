"""Where the columns of q, k and v lie in a projection."""

import jax.numpy as jnp

from pallas_kernels.state_kernels import divided


def separate(heads, options):
    """The heads with qkv as heads of q, then of k, then of v, and no other columns."""
    shape, qkv = options.shape, heads.qkv
    if not options.by_key_head:
        return heads._replace(qkv=qkv[:, : shape.columns])
    rows, key = len(qkv), shape.key_dim
    of_group = qkv[:, : options.least_columns].reshape(rows, shape.key_heads, -1)
    parts = jnp.split(of_group, [key, 2 * key, 2 * key + _values(shape)], axis=2)[:3]
    return heads._replace(qkv=jnp.concatenate([part.reshape(rows, -1) for part in parts], axis=1))


def source(column, shape):
    """The columns of a projection by key head that hold these columns, int32[C], of q, k and v."""
    key, wide = shape.key_dim, _values(shape)
    keys = shape.key_heads * key

    def of(column, each, behind):
        head, place = divided(column, each)
        return head * (2 * key + 2 * wide) + behind + place

    of_keys = jnp.where(column < keys, of(column, key, 0), of(column - keys, key, key))
    return jnp.where(column < 2 * keys, of_keys, of(column - 2 * keys, wide, 2 * key))


def _values(shape):
    """Columns of a key head's values."""
    return shape.value_heads // shape.key_heads * shape.value_dim
