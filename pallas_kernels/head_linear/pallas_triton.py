"""head_linear as one Triton-lowered kernel that indexes the stacked weights by layer and head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.linear.pallas_triton import DECODE_TILES, PROGRAMS, Config
from pallas_kernels.triton import (
    KERNEL_DTYPES,
    edge_mask,
    load_tile,
    scalar,
    sum_over_depth,
    tile_mask,
    triton_call,
)


def configuration(
    row_tile: int, heads: int, outputs: int, inputs: int, dtype: jax.typing.DTypeLike
) -> Config:
    """The tiles for heads of weights [outputs, inputs]. They decide the bits of a row; T does not.

    They are chosen as linear's, no deeper than the sum, with two tiles of weights in flight: 72 KiB
    of shared memory, which every GPU has.

    Raises ValueError for float32, whose products Triton would compute in TF32.
    """
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(f"head_linear 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it")
    least = max(16, pl.next_power_of_2(inputs))
    if row_tile >= 64:
        return Config(64, columns=128, depth=min(64, least), num_warps=4, num_stages=3)
    fitting = [tile for tile in DECODE_TILES if heads * outputs >= tile[0] * PROGRAMS]
    columns, depth = (*fitting, DECODE_TILES[-1])[0]
    return Config(16, columns=columns, depth=min(depth, least), num_warps=4, num_stages=3)


def head_linear(x, weights, layer, *, part, transposed, row_tile, tiles):
    (tokens, heads, inputs), (first, stop) = x.shape, part
    outputs = weights.shape[3] if transposed else stop - first
    dtype = jnp.promote_types(x.dtype, weights.dtype)
    config = configuration(row_tile, heads, outputs, inputs, dtype)
    options = dict(config=config, first=first, transposed=transposed, row_tile=row_tile)
    return triton_call(
        functools.partial(_kernel, **options),
        name="head_linear",
        # Row tiles run first: those that share weights read them from HBM once.
        grid=(pl.cdiv(tokens, config.rows), heads, pl.cdiv(outputs, config.columns)),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, outputs), x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(
        scalar(layer),
        scalar(tiles),
        x,
        weights,
    )


def _kernel(layer, tiles, x, weights, out, *, config, first, transposed, row_tile):
    """Program (i, h, j) computes row tile i and column tile j of head h's product; the sum ascends.

    Writes: program (i, h, j) alone writes out[i·rows:(i+1)·rows, h, j·columns:(j+1)·columns], and
    nothing if the tile is past the rows in use.
    """
    (tokens, _, inputs), outputs = x.shape, out.shape[2]
    head = pl.program_id(1)
    first_row, first_column = pl.program_id(0) * config.rows, pl.program_id(2) * config.columns
    rows, columns = pl.ds(first_row, config.rows), pl.ds(first_column, config.columns)
    row_mask = edge_mask(first_row, config.rows, tokens)
    column_mask = edge_mask(first_column, config.columns, outputs)

    @pl.when(first_row < tiles[0] * row_tile)
    def _():
        def add(k, total, depth_mask):
            depth = pl.ds(k * config.depth, config.depth)
            values = load_tile(x.at[rows, head, depth], row_mask, depth_mask)
            if transposed:
                of_part = pl.ds(first + k * config.depth, config.depth)
                at = weights.at[layer[0], head, of_part, columns]
                return total + plgpu.dot(values, load_tile(at, depth_mask, column_mask))
            of_part = pl.ds(first + first_column, config.columns)
            at = weights.at[layer[0], head, of_part, depth]
            weight = load_tile(at, column_mask, depth_mask)
            return total + plgpu.dot(values, weight, trans_b=True)

        total = jnp.zeros((config.rows, config.columns), jnp.float32)
        total = sum_over_depth(add, total, inputs, config.depth)
        mask = tile_mask(row_mask, column_mask, total.shape)
        plgpu.store(out.at[rows, head, columns], total.astype(out.dtype), mask=mask)
