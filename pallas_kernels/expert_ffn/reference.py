import jax
import jax.numpy as jnp
from jax import lax


def expert_ffn(
    y, x, ids, arena, stores, layer, address, version, active, active_count, *, activation, row_tile
):
    tokens, k = ids.shape
    pairs = tokens * k
    address = lax.dynamic_index_in_dim(address, layer, keepdims=False)
    version = lax.dynamic_index_in_dim(version, layer, keepdims=False)
    flat = ids.reshape(-1)
    # Pairs (token, slot) grouped by expert; padding pairs carry the id E and sort to the end.
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    edges = jnp.arange(address.shape[0] + 1)
    first = jnp.sum(flat < edges[:, None], axis=1, dtype=jnp.int32)

    def expert(i, y):
        e = active[i]
        gate, up, down = _load(arena, stores, layer, e, address[e], version[e], x.dtype)

        def tile(n, y):
            place = first[e] + n * row_tile + jnp.arange(row_tile)
            inside = place < first[e + 1]
            pair = order[jnp.minimum(place, pairs - 1)]
            out = _ffn(x[pair // k], gate, up, down, activation)
            # Rows past the expert's last token are computed and dropped.
            return y.at[jnp.where(inside, pair, pairs)].set(out, mode="drop")

        tiles = (first[e + 1] - first[e] + row_tile - 1) // row_tile
        return lax.fori_loop(0, tiles, tile, y)

    return lax.fori_loop(0, active_count, expert, y)


def _load(arena, stores, layer, expert, address, version, dtype):
    """One expert's matrices, from its cell or, without one, from the store. Dense records only."""
    (store,) = stores
    rows, hidden = store.shape[2:]

    def from_cell(_, record):
        return lax.dynamic_slice(arena, (address, 0), (rows, hidden))

    def from_store(_, record):
        found = lax.dynamic_slice(store, (layer, expert, 0, 0), (1, 1, rows, hidden))
        return jax.device_put(found, jax.memory.Space.Device)[0, 0]

    cached = (address >= 0).astype(jnp.int32)
    record = jnp.zeros((rows, hidden), jnp.uint16)
    record = lax.fori_loop(0, cached, from_cell, record)
    record = lax.fori_loop(0, 1 - cached, from_store, record)
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 4:
        record = record.reshape(rows // 2, hidden, 2)
    weights = lax.bitcast_convert_type(record, dtype)
    width = weights.shape[0] // 3
    return weights[:width], weights[width : 2 * width], weights[2 * width :]


def _ffn(x, gate, up, down, activation):
    def product(a, b, contract):
        return lax.dot_general(
            a,
            b,
            (contract, ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    hidden = activation(product(x, gate, ((1,), (1,)))) * product(x, up, ((1,), (1,)))
    return product(hidden.astype(x.dtype), down, ((1,), (0,)))
