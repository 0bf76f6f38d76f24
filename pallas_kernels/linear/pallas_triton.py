"""linear as one Triton-lowered kernel that indexes the stacked weights by layer, and a kernel that
computes it in parts of the depth. Both can also normalise their rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.cards import CLASSES
from pallas_kernels.linear.operands import Norm, Tiling
from pallas_kernels.rms_norm.pallas_triton import rms_norm, sum_of_row, sum_of_squares
from pallas_kernels.triton import (
    KERNEL_DTYPES,
    edge_mask,
    is_last,
    load_tile,
    scalar,
    sum_over_depth,
    tile_mask,
    triton_call,
)

DECODE_TILES = ((128, 128), (32, 256), (16, 512))
"""columns × depth, the widest first."""

DECODE_STAGES = {99: (3, 4, 4), 163: (4, 4, 4), 227: (4, 4, 4)}
"""Class of GPU → stages of each of DECODE_TILES."""

PREFILL_STAGES = {99: 4, 163: 4, 227: 4}

PROGRAMS = 128
"""Column tiles, of all heads, below which a GPU of 132 multiprocessors would stand idle."""

NORMED_ROWS = 32
"""Most rows that are normalised within a product: two tiles. Each program sums the squares of its
own tile. With more rows the programs run in several waves, and summing again costs more than the
launch that is saved."""

NORMED_STAGES = 3
"""Most stages with the deepest tile, whose normalised x takes 16 KiB of shared memory: four stages
of 32 KiB would not fit a GPU of 99 KiB. Also with two tiles of rows, so that three programs of q, k
and v fit a multiprocessor of 227 KiB, and all 320 of Qwen3-30B-A3B run at once."""

NORMED_PARTS_WARPS = 8
"""Warps of a program that computes a part of normalised rows. A warp holds squares of the rows and
then a whole tile of x, which spilled registers with four warps. No bit depends on it."""

CHUNK = 512
"""Columns whose squares a program holds at once while it sums rows. No bit depends on it."""

LEAST_DEPTH = 128
"""Depth of the shortest part: each thread loads weights twice."""

PART_VALUES = 1024
"""Most parts × outputs of a row: their reader has few programs (`route`: one for 4 rows)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One program computes rows × columns of the product, depth of K at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def configuration(
    row_tile: int, outputs: int, dtype: jax.typing.DTypeLike, shared_kib: int = CLASSES[-1]
) -> Config:
    """The tiles for weights [outputs, K]. They decide the bits of a row; T does not. Stages depend
    on the class of GPU, see `cards`.

    Decode (row_tile below 64) is bound by reading the weights. Its tiles are as wide as possible
    with a program for every multiprocessor, since a wider tile reads x from L2 less often, and have
    48 KiB of weights or more in flight. Only 32 × 256 was measured (probe9). Prefill is bound by
    arithmetic: 64 rows are the fewest that compile to wgmma.

    Raises ValueError for float32, whose products Triton would compute in TF32.
    """
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(f"linear 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it")
    if row_tile >= 64:
        stages = PREFILL_STAGES[shared_kib]
        return Config(rows=64, columns=128, depth=64, num_warps=4, num_stages=stages)
    tiles = list(zip(DECODE_TILES, DECODE_STAGES[shared_kib], strict=True))
    fitting = [tile for tile in tiles if outputs >= tile[0][0] * PROGRAMS]
    (columns, depth), stages = (*fitting, tiles[-1])[0]
    return Config(rows=16, columns=columns, depth=depth, num_warps=4, num_stages=stages)


class Fused(NamedTuple):
    """What a product's launch does beside the product."""

    residual: Any = None
    """[T, N], added to the product; None: nothing."""
    norm: Norm | None = None
    """The norm of x before the product; None: there is none."""
    with_squares: bool = False
    """Whether to return squares, as linear_with_squares does."""


ALONE = Fused()
"""Nothing."""


class Last(NamedTuple):
    """Work of the last program of a product, once all parts are written."""

    name: str
    """The kernel's name."""
    run: Callable[[Any, Any, Any], None]
    """Takes refs to the parts, the operands and the results."""
    counters: jax.Array
    """See is_last; programs count in the first one."""
    operands: tuple
    out_shape: tuple[jax.ShapeDtypeStruct, ...]
    aliases: Mapping[int, int]
    """Leaf of the operands → result that uses its memory."""
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """A decode product in `count` parts, each of `turns` tiles."""

    count: int
    turns: int
    tile: Config


def parts_of(
    outputs: int, inputs: int, dtype: jax.typing.DTypeLike, shared_kib: int = CLASSES[-1]
) -> Parts:
    """The parts of decode's product with weights [outputs, inputs]. They decide the bits of a row;
    T does not.

    There are enough parts for a program on every multiprocessor, as long as a row of all parts is
    short. All have the same number of tiles, at most as deep as `linear`'s.
    """
    tile = configuration(16, outputs, dtype, shared_kib)
    most = PROGRAMS // pl.cdiv(outputs, tile.columns)
    most = min(most, PART_VALUES // max(outputs, tile.columns))
    whole, depth = pl.cdiv(inputs, LEAST_DEPTH), LEAST_DEPTH
    count = max((n for n in range(1, most + 1) if whole % n == 0), default=1)
    turns = whole // count
    while turns % 2 == 0 and depth < tile.depth:
        depth, turns = 2 * depth, turns // 2
    return Parts(count, turns, dataclasses.replace(tile, depth=depth))


def linear(x, weights, layer, bias, tiling: Tiling, out_dtype, fused: Fused = ALONE):
    """linear of the api. fused: what the launch also does."""
    (tokens, _), outputs, norm = x.shape, weights.shape[1], fused.norm
    dtype, eps = jnp.promote_types(x.dtype, weights.dtype), None
    if norm is not None:
        dtype, eps = jnp.promote_types(dtype, norm.weights.dtype), norm.eps
    config = configuration(tiling.row_tile, outputs, dtype, tiling.shared_kib)
    column_tiles = pl.cdiv(outputs, config.columns)
    out = jax.ShapeDtypeStruct((tokens, outputs), out_dtype)
    squares = jax.ShapeDtypeStruct((tokens, column_tiles), jnp.float32)
    return triton_call(
        functools.partial(_kernel, config=config, row_tile=tiling.row_tile, eps=eps),
        name="linear" if norm is None else "norm_linear",
        # Row tiles run first: those that share weights read them from HBM once.
        grid=(pl.cdiv(tokens, config.rows), column_tiles),
        out_shape=(out, squares) if fused.with_squares else out,
        num_warps=config.num_warps,
        num_stages=config.num_stages if norm is None else _normed_stages(config, tokens),
    )(
        scalar(layer),
        scalar(tiling.tiles),
        x,
        weights,
        (
            () if bias is None else (bias,),
            () if fused.residual is None else (fused.residual,),
            _norm_operands(norm),
        ),
    )


def _kernel(layer, tiles, x, weights, beside, out, *out_squares, config, row_tile, eps):
    """Program (i, j) computes row tile i and column tile j of the product; K ascends.

    - `beside`: bias and residual, one array or none each, and _norm_operands. With a norm each
      program first sums the squares of its rows.
    - `out_squares`: one array or none.

    Writes: program (i, j) alone writes out[i·rows:(i+1)·rows, j·columns:(j+1)·columns] and
    out_squares[i·rows:(i+1)·rows, j], and nothing if the tile is past the rows in use.
    """
    (tokens, inputs), outputs, j = x.shape, weights.shape[1], pl.program_id(1)
    bias, residual, norm = beside
    first_row, first_column = pl.program_id(0) * config.rows, j * config.columns
    rows, columns = pl.ds(first_row, config.rows), pl.ds(first_column, config.columns)
    row_mask = edge_mask(first_row, config.rows, tokens)
    column_mask = edge_mask(first_column, config.columns, outputs)

    @pl.when(first_row < tiles[0] * row_tile)
    def _():
        scales = [_scales(x, norm[1:], first_row, config.rows, eps) for _ in norm[:1]]

        def add(k, total, depth_mask):
            depth = pl.ds(k * config.depth, config.depth)
            part = load_tile(x.at[rows, depth], row_mask, depth_mask)
            for scale, of in zip(scales, norm[:1], strict=True):
                part = _normed(part, scale, of, layer[0], depth, depth_mask)
            weight = load_tile(weights.at[layer[0], columns, depth], column_mask, depth_mask)
            return total + plgpu.dot(part, weight, trans_b=True)

        mask = tile_mask(row_mask, column_mask, (config.rows, config.columns))
        # Before the sum, so that the load does not wait for the last tile of weights.
        added = [load_tile(r.at[rows, columns], row_mask, column_mask) for r in residual]
        total = jnp.zeros((config.rows, config.columns), jnp.float32)
        total = sum_over_depth(add, total, inputs, config.depth)
        if bias:
            row = load_tile(bias[0].at[pl.ds(layer[0], 1), columns], None, column_mask)
            total = total + row.astype(jnp.float32)
        result = total.astype(out.dtype)
        for part in added:  # the product is rounded before the sum is
            result = (part.astype(jnp.float32) + result.astype(jnp.float32)).astype(out.dtype)
        plgpu.store(out.at[rows, columns], result, mask=mask)
        for to in out_squares:  # of what is stored; zeros behind the last column
            plgpu.store(to.at[rows, j], sum_of_squares(result), mask=row_mask)


def _norm_operands(norm: Norm | None) -> tuple[jax.Array, ...]:
    """A norm's weights and, if given, the squares of x."""
    if norm is None:
        return ()
    return (norm.weights,) if norm.squares is None else (norm.weights, norm.squares)


def _normed_stages(config: Config, tokens: int) -> int:
    deepest = config.depth == max(depth for _, depth in DECODE_TILES)
    fewer = deepest or tokens > config.rows
    return min(config.num_stages, NORMED_STAGES) if fewer else config.num_stages


def _normed(values, scale, norm, layer, depth, depth_mask):
    """A tile of x after rms_norm, rounded where rms_norm rounds. scale: see _scales."""
    factors = load_tile(norm.at[pl.ds(layer, 1), depth], None, depth_mask)
    return factors * (values.astype(jnp.float32) * scale).astype(values.dtype)


def _scales(x, squares, first_row, rows, eps):
    """The factors [rows, 1] of the rows from first_row on, with the bits of rms_norm. Rows past the
    last one are 0 whatever their factor, so no sums are computed for them.

    - `squares`: one array, the sums of x's tiles, or none: then x is read.
    """
    tokens, width = x.shape
    # Sums of tiles are few: with all rows Triton normalises x as it is loaded, with fewer once more
    # for each warp (2,881 and 6,918 instructions of norm_linear).
    few = rows if squares else min(rows, pl.next_power_of_2(tokens))
    row_mask = edge_mask(first_row, few, tokens)

    def load(of, first, size):
        end = of.shape[1]
        mask = edge_mask(first, size, end) if first + size > end else None
        # A dynamic index, since a static slice must not reach beyond its array.
        return load_tile(
            of.at[pl.ds(first_row, few), pl.ds(0 * first_row + first, size)], row_mask, mask
        )

    def tile_sum(first, size):
        """The sum of the squares of `size` columns: a subtree of the whole sum."""
        if size <= CHUNK:
            return sum_of_squares(load(x, first, size))
        half = size // 2
        low = tile_sum(first, half)
        return low if first + half >= width else low + tile_sum(first + half, half)

    if squares:
        total = sum_of_row(load(squares[0], 0, pl.next_power_of_2(squares[0].shape[1])))
    else:
        total = tile_sum(0, pl.next_power_of_2(width))
    scale = lax.rsqrt(total / width + eps)
    return jnp.broadcast_to(scale[None], (rows // few, few)).reshape(rows, 1)


def linear_parts(x, weights, layer, tiling: Tiling):
    dtype = jnp.promote_types(x.dtype, weights.dtype)
    parts = _several_parts(weights.shape, dtype, tiling)
    if parts is None:
        return linear(x, weights, layer, None, tiling, jnp.float32)[None]
    return _in_parts(x, weights, layer, None, parts, tiling)


def norm_linear_parts(x, norm: Norm, weights, layer, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """(rms_norm of x, its linear_parts) as one launch, or as two if there is only one part."""
    parts = _several_parts(weights.shape, _normed_dtype(x, norm, weights), tiling)
    if parts is None:
        normed = rms_norm(x, norm.weights, layer, norm.eps)
        return normed, linear_parts(normed, weights, layer, tiling)
    return _in_parts(x, weights, layer, norm, parts, tiling)


def norm_linear_parts_then(
    x, norm: Norm, weights, layer, last: Last, tiling: Tiling
) -> tuple[jax.Array, ...]:
    """norm_linear_parts of several parts, and in the same launch the work of the last program.
    Returns (normed, parts, counters, *results)."""
    (tokens, _), outputs, norms = x.shape, weights.shape[1], _norm_operands(norm)
    parts = _several_parts(weights.shape, _normed_dtype(x, norm, weights), tiling)
    assert parts is not None, f"{last.name} is of several parts"
    config, counters, first = parts.tile, last.counters, 4 + len(norms)
    grid = (pl.cdiv(tokens, config.rows), pl.cdiv(outputs, config.columns), parts.count)

    def kernel(layer, tiles, x, weights, norms, _counters, operands, *outs):
        normed, out, counters, *results = outs
        static = {"parts": parts, "row_tile": tiling.row_tile, "eps": norm.eps}
        _parts_kernel(layer, tiles, x, weights, norms, normed, out, **static)

        @pl.when(is_last(counters, (pl.program_id(0) * 0,), math.prod(grid)))
        def _():
            last.run(out, operands, results)

    return triton_call(
        kernel,
        name=last.name,
        grid=grid,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((parts.count, tokens, outputs), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
            *last.out_shape,
        ),
        num_warps=last.num_warps,
        num_stages=_normed_stages(config, tokens),
        aliases={first: 2} | {first + 1 + leaf: 3 + out for leaf, out in last.aliases.items()},
    )(scalar(layer), scalar(tiling.tiles), x, weights, norms, counters, last.operands)


def _normed_dtype(x, norm: Norm, weights) -> jnp.dtype:
    return jnp.promote_types(jnp.promote_types(x.dtype, weights.dtype), norm.weights.dtype)


def _several_parts(weights_shape, dtype, tiling: Tiling) -> Parts | None:
    """The parts of a product with weights [L, N, K]; None: there is one part, as in `linear`."""
    if tiling.row_tile >= 64:
        return None
    _, outputs, inputs = weights_shape
    parts = parts_of(outputs, inputs, dtype, tiling.shared_kib)
    return None if parts.count == 1 else parts


def _in_parts(x, weights, layer, norm, parts: Parts, tiling: Tiling):
    """The product in parts. norm: rms_norm of x before it, or None."""
    (tokens, _), outputs, config = x.shape, weights.shape[1], parts.tile
    out = jax.ShapeDtypeStruct((parts.count, tokens, outputs), jnp.float32)
    normed = jax.ShapeDtypeStruct(x.shape, x.dtype)
    eps = None if norm is None else norm.eps
    return triton_call(
        functools.partial(_parts_kernel, parts=parts, row_tile=tiling.row_tile, eps=eps),
        name="linear_parts" if norm is None else "norm_linear_parts",
        grid=(pl.cdiv(tokens, config.rows), pl.cdiv(outputs, config.columns), parts.count),
        out_shape=out if norm is None else (normed, out),
        num_warps=config.num_warps if norm is None else NORMED_PARTS_WARPS,
        num_stages=config.num_stages if norm is None else _normed_stages(config, tokens),
    )(scalar(layer), scalar(tiling.tiles), x, weights, _norm_operands(norm))


def _parts_kernel(layer, tiles, x, weights, norm, *outs, parts, row_tile, eps):
    """Program (i, j, s) computes row tile i and column tile j of part s, over its tiles from depth
    s · turns · depth on; the depth ascends.

    - `norm`: _norm_operands. With them `outs` are normalised x and the parts, otherwise the parts.

    Writes: program (i, j, s) alone writes out[s, i·rows:(i+1)·rows, j·columns:(j+1)·columns], and
    program (i, 0, s) alone writes the part's depth of normalised x in the rows of i. Programs past
    the rows in use write nothing.
    """
    (tokens, inputs), outputs, config = x.shape, weights.shape[1], parts.tile
    (*normed, out), part = outs, pl.program_id(2)
    first_row, first_column = pl.program_id(0) * config.rows, pl.program_id(1) * config.columns
    rows, columns = pl.ds(first_row, config.rows), pl.ds(first_column, config.columns)
    row_mask = edge_mask(first_row, config.rows, tokens)
    column_mask = edge_mask(first_column, config.columns, outputs)

    @pl.when(first_row < tiles[0] * row_tile)
    def _():
        scales = [_scales(x, norm[1:], first_row, config.rows, eps) for _ in norm[:1]]
        writes = first_column == 0

        def add(turn, total):
            first = (part * parts.turns + turn) * config.depth
            depth, depth_mask = pl.ds(first, config.depth), edge_mask(first, config.depth, inputs)
            values = load_tile(x.at[rows, depth], row_mask, depth_mask)
            for scale, of, to in zip(scales, norm[:1], normed, strict=True):
                values = _normed(values, scale, of, layer[0], depth, depth_mask)
                # A mask, not a branch, which would keep the loop's loads from running ahead.
                inside = tile_mask(row_mask, depth_mask, values.shape)
                mask = jnp.broadcast_to(writes, values.shape)
                plgpu.store(
                    to.at[rows, depth], values, mask=mask if inside is None else mask & inside
                )
            weight = load_tile(weights.at[layer[0], columns, depth], column_mask, depth_mask)
            return total + plgpu.dot(values, weight, trans_b=True)

        mask = tile_mask(row_mask, column_mask, (config.rows, config.columns))
        total = jnp.zeros((config.rows, config.columns), jnp.float32)
        total = add(0, total) if parts.turns == 1 else lax.fori_loop(0, parts.turns, add, total)
        plgpu.store(out.at[part, rows, columns], total, mask=mask)
