import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.activation import gated
from pallas_kernels.records.reference import decode, split_weights


def expert_ffn(y, arena, batch, places, options):
    stores, layer, address, version = places
    x, ids, row_tile, formats = batch.x, batch.ids, options.row_tile, options.formats
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
        e = batch.active[i]
        weights = _load(arena, stores, layer, e, address[e], version[e], formats)
        matrices, biases = split_weights(weights, formats[0].cell)

        def tile(n, y):
            place = first[e] + n * row_tile + jnp.arange(row_tile)
            inside = place < first[e + 1]
            pair = order[jnp.minimum(place, pairs - 1)]
            out = _ffn(x[pair // k], matrices, biases, options.activation)
            # Rows past the expert's last token are computed and dropped.
            return y.at[jnp.where(inside, pair, pairs)].set(out, mode="drop")

        tiles = (first[e + 1] - first[e] + row_tile - 1) // row_tile
        return lax.fori_loop(0, tiles, tile, y)

    return lax.fori_loop(0, batch.active_count, expert, y)


def _load(arena, stores, layer, expert, address, version, formats):
    """One expert's weights as `decode` returns them, from its cell or, without one, from the
    store."""
    cached = (address >= 0).astype(jnp.int32)
    records = {}  # by format, of which an expert has one

    def read(fmt, number, here, source):
        """Zero or one trip, as in fill."""
        if len(formats) > 1:
            here = here * (version == number)
        empty = jnp.zeros((fmt.rows, fmt.hidden), jnp.uint16), jnp.int32(0)
        record, found = records.get(fmt, empty)
        records[fmt] = lax.fori_loop(0, here, lambda _, record: source(), record), found + here

    for number, (cell, held, _) in enumerate(formats):

        def from_cell(cell=cell):
            return lax.dynamic_slice(arena, (address, 0), (cell.rows, cell.hidden))

        def from_store(number=number, held=held):
            start = (formats[number].place(layer), expert, 0, 0)
            found = lax.dynamic_slice(stores[number], start, (1, 1, held.rows, held.hidden))
            return jax.device_put(found, jax.memory.Space.Device)[0, 0]

        read(cell, number, cached, from_cell)
        read(held, number, 1 - cached, from_store)
    if len(records) == 1:
        ((fmt, (record, _)),) = records.items()
        return decode(record, fmt)
    weights = jnp.zeros((cell.weight_rows, cell.hidden), cell.dtype)
    for fmt, (record, found) in records.items():
        weights = lax.fori_loop(0, found, lambda _, w, r=record, f=fmt: decode(r, f), weights)
    return weights


def _ffn(x, matrices, biases, activation):
    def product(a, number, contract):
        out = lax.dot_general(
            a,
            matrices[number],
            (contract, ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return out if biases[number] is None else out + biases[number].astype(jnp.float32)

    gate, up = (product(x, number, ((1,), (1,))) for number in (0, 1))
    return product(gated(activation, gate, up).astype(x.dtype), 2, ((1,), (0,)))
