"""linear as one Mosaic kernel that indexes the stacked weights by layer."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import check_mosaic, mosaic_call
from pallas_kernels.mosaic_product import ROWS, most_columns, products
from pallas_kernels.triton import power_of_two_divisor, scalar


def linear(x, weights, layer, bias, tiling, out_dtype):
    """linear of the api. XLA adds a bias behind the kernel, which then returns float32."""
    (tokens, inputs), outputs = x.shape, weights.shape[1]
    check_mosaic("linear", [inputs, outputs], x.dtype, weights.dtype)
    rows = pl.cdiv(tokens, ROWS) * ROWS
    if rows > tokens:  # decode's few rows; prefill's are whole tiles
        x = jnp.pad(x, ((0, rows - tokens), (0, 0)))
    columns = power_of_two_divisor(outputs, most_columns())
    out = mosaic_call(
        functools.partial(_kernel, row_tile=tiling.row_tile, columns=columns),
        name="linear",
        # Row tiles run first: those that share weights read them from HBM once.
        grid={"column": outputs // columns, "row": rows // ROWS},
        out_type=jax.ShapeDtypeStruct((rows, outputs), out_dtype if bias is None else jnp.float32),
    )(scalar(layer), scalar(tiling.tiles), x, weights)
    out = out[:tokens]
    if bias is None:
        return out
    added = lax.dynamic_index_in_dim(bias, layer, keepdims=False).astype(jnp.float32)
    return (out + added).astype(out_dtype)


def _kernel(layer, tiles, x, weights, out, *, row_tile, columns):
    """Program (j, i) computes row tile i and column tile j of the product; K ascends.

    Writes: program (j, i) alone writes out[64·i:64·(i+1), j·columns:(j+1)·columns], and nothing if
    the tile is past the rows in use.
    """
    first = lax.axis_index("row") * ROWS
    rows, across = pl.ds(first, ROWS), pl.ds(lax.axis_index("column") * columns, columns)

    @pl.when(first < tiles[0] * row_tile)
    def _():
        (total,) = products(x.at[rows], [weights.at[layer[0], across]], columns)
        plgpu.store(out.at[rows, across], total.astype(out.dtype), optimized=False)
