import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.activation import gated
from pallas_kernels.records.format import MATRICES
from pallas_kernels.records.integers import multiply
from pallas_kernels.records.reference import decode, split_weights


def expert_ffn(y, arena, batch, places, options):
    stores, layer, address, version = places
    x, ids, row_tile, formats = batch.x, batch.ids, options.row_tile, options.formats
    integers = options.arithmetic == "int8"
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
        records = _load(arena, stores, layer, e, address[e], version[e], formats)
        if not integers:
            products = _products(*split_weights(_decode(records), formats[0].cell))
            return each_tile(e, y, products)
        for fmt, (record, found) in records.items():  # of which the expert has one
            y = lax.fori_loop(
                0, found, lambda _, y, r=record, f=fmt: each_tile(e, y, _of_integers(r, f)), y
            )
        return y

    def each_tile(e, y, products):
        def tile(n, y):
            place = first[e] + n * row_tile + jnp.arange(row_tile)
            inside = place < first[e + 1]
            pair = order[jnp.minimum(place, pairs - 1)]
            out = _ffn(x[pair // k], products, options.activation)
            # Rows past the expert's last token are computed and dropped.
            return y.at[jnp.where(inside, pair, pairs)].set(out, mode="drop")

        tiles = (first[e + 1] - first[e] + row_tile - 1) // row_tile
        return lax.fori_loop(0, tiles, tile, y)

    return lax.fori_loop(0, batch.active_count, expert, y)


def _load(arena, stores, layer, expert, address, version, formats):
    """Format → an expert's record and how many there are, 0 or 1: from its cell or, without one,
    from the store."""
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
    return records


def _decode(records):
    """The weights of the record that there is."""
    if len(records) == 1:
        ((fmt, (record, _)),) = records.items()
        return decode(record, fmt)
    cell = next(iter(records))
    weights = jnp.zeros((cell.weight_rows, cell.hidden), cell.dtype)
    for fmt, (record, found) in records.items():
        weights = lax.fori_loop(0, found, lambda _, w, r=record, f=fmt: decode(r, f), weights)
    return weights


def _products(matrices, biases):
    """x, the number of a matrix → their product."""

    def product(x, number):
        contract = ((1,), (0,)) if number == 2 else ((1,), (1,))
        out = lax.dot_general(
            x,
            matrices[number],
            (contract, ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return out if biases[number] is None else out + biases[number].astype(jnp.float32)

    return product


def _of_integers(record, fmt):
    biases = split_weights(decode(record, fmt), fmt)[1]

    def product(x, number):
        matrix = MATRICES[number] if fmt.gated or number else "up"
        out = multiply(x, record, fmt, matrix)
        return out if biases[number] is None else out + biases[number].astype(jnp.float32)

    return product


def _ffn(x, product, activation):
    gate, up = (product(x, number) for number in (0, 1))
    return product(gated(activation, gate, up).astype(x.dtype), 2)
