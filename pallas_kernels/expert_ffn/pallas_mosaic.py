"""expert_ffn as two Mosaic kernels over (token, slot) pairs sorted by expert, in tiles of 64 rows.

XLA gathers the rows of x; the second kernel writes each row of y where its pair belongs. Kernels
read cells only: an expert without one is copied to a record of its own first, one after the other,
and computed by the same kernels, so it has the same bits.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_ffn.many_tokens import Groups, group, sort_pairs
from pallas_kernels.expert_ffn.operands import why_not_mosaic
from pallas_kernels.expert_ffn.pallas_triton import in_kernels
from pallas_kernels.expert_ffn.tile import DOWN, GATE, UP
from pallas_kernels.mosaic import check_mosaic, mosaic_call
from pallas_kernels.mosaic_product import ROWS, most_columns, products
from pallas_kernels.triton import power_of_two_divisor

COLUMNS = 128
"""Of y that a program of down computes: a warpgroup stores a row of them at once."""


def expert_ffn(y, arena, batch, places, options):
    """expert_ffn of the api, for tiles of 64 rows whatever `row_tile` is."""
    if reason := why_not_mosaic(options.formats, options.activation):
        raise ValueError(f"expert_ffn 'mosaic': {reason}; 'xla' takes it")
    active, count, ids, x, pairs = batch
    (store,), layer = places.stores, places.layer
    ((fmt, _, _),) = formats = options.formats
    check_mosaic("expert_ffn", [x.shape[1], fmt.width], x.dtype, fmt.dtype)
    address = lax.dynamic_index_in_dim(places.address, layer, keepdims=False)
    pairs = sort_pairs(ids, len(address)) if pairs is None else pairs
    listed = jnp.arange(len(active)) < count
    in_cell = listed & (address[active] >= 0)
    given = {"x": x, "slots": ids.shape[1], "width": fmt.width}
    run = functools.partial(_run, activation=in_kernels(options.activation), **given)
    y = run(y, lax.bitcast_convert_type(arena, x.dtype), group(pairs, active, in_cell), address)
    absent = jnp.cumsum(listed & ~in_cell)

    def through(n, y):
        expert = active[jnp.sum(absent <= n)]
        start = (formats[0].place(layer), expert, 0, 0)
        record = lax.dynamic_slice(store, start, (1, 1, fmt.rows, fmt.hidden))
        record = jax.device_put(record, jax.memory.Space.Device)[0, 0]
        groups = group(pairs, expert[None], jnp.ones(1, bool))
        return run(y, lax.bitcast_convert_type(record, x.dtype), groups, jnp.zeros_like(address))

    return lax.fori_loop(0, absent[-1], through, y)


def _run(y, records, groups: Groups, address, *, x, slots, activation, width):
    """y with the rows of the groups' pairs.

    - `records`: [rows, D].
    - `address`: the row of each expert's record, a multiple of 8.
    """
    hidden, most = x.shape[1], len(groups.expert)
    first = jnp.where(groups.expert >= 0, address[groups.expert], -1)
    within = (jnp.arange(most) - groups.head)[:, None] * ROWS + jnp.arange(ROWS)
    place = groups.first[groups.expert][:, None] + within
    inside = place < groups.first[groups.expert + 1][:, None]
    pair = groups.order[jnp.minimum(place, len(groups.order) - 1)]
    rows = x[pair.reshape(-1) // slots]
    pair = jnp.where(inside, pair, len(y)).reshape(-1)
    columns = power_of_two_divisor(width, most_columns())
    h = mosaic_call(
        functools.partial(_gate_up, columns=columns, width=width, activation=activation),
        name="expert_gate_up",
        grid={"tile": most, "column": width // columns},
        out_type=jax.ShapeDtypeStruct((most * ROWS, width), x.dtype),
    )(first, rows, records)
    ref = jax.new_ref(y)
    mosaic_call(
        functools.partial(_down, width=width),
        name="expert_down",
        grid={"tile": most, "column": hidden // COLUMNS},
        out_type=(),
        scratch={"block": plgpu.SMEM((ROWS, COLUMNS), jnp.float32)},
    )(first, pair, h, records, ref)
    return jax.freeze(ref)


def _gate_up(first, x, records, h, *, columns, width, activation):
    """Program (n, j) computes column tile j of act(gate(x))·up(x) of row tile n.

    Writes: program (n, j) alone writes h[64·n:64·(n+1), j·columns:(j+1)·columns], and nothing if
    the tile has no expert.
    """
    tile, column = lax.axis_index("tile"), lax.axis_index("column") * columns
    rows, address = pl.ds(tile * ROWS, ROWS), first[tile]

    def matrix(number):
        return records.at[pl.ds(pl.multiple_of(address + number * width + column, 8), columns)]

    @pl.when(address >= 0)
    def _():
        gate, up = products(x.at[rows], [matrix(GATE), matrix(UP)], columns)
        value = activation(gate, up).astype(h.dtype)
        plgpu.store(h.at[rows, pl.ds(column, columns)], value, optimized=False)


def _down(first, pairs, h, records, y, *, block, width):
    """Program (n, j) computes column tile j of the rows of y that are the pairs of row tile n.

    Writes: program (n, j) alone writes y[pair, j·COLUMNS:(j+1)·COLUMNS] of the tile's pairs: a pair
    is in one tile. Rows past the expert's last pair have none.
    """
    tile, column = lax.axis_index("tile"), lax.axis_index("column") * COLUMNS
    address, columns = first[tile], most_columns()

    @pl.when(address >= 0)
    def _():
        rows = pl.ds(pl.multiple_of(address + DOWN * width, 8), width)
        for part in range(0, COLUMNS, columns):
            of = records.at[rows, pl.ds(column + part, columns)]
            (total,) = products(h.at[pl.ds(tile * ROWS, ROWS)], [of], columns, down=True)
            plgpu.store(block.at[:, pl.ds(part, columns)], total, optimized=False)

        @pl.loop(0, ROWS)
        def _(row):
            pair = pairs[tile * ROWS + row]

            @pl.when(pair < y.shape[0])
            def _():
                y[pair, pl.ds(column, COLUMNS)] = block[row]
