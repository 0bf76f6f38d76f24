"""rms_norm as one Triton-lowered kernel with a program for each row, and its sums of squares."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.triton import KERNEL_DTYPES, edge_mask, is_interpreted, scalar, triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    columns: int
    """A row, rounded up to a power of two."""
    num_warps: int
    num_stages: int


def configuration(width: int, dtype: jax.typing.DTypeLike, op: str = "rms_norm") -> Config:
    """A row is read once, by enough warps for 16 values (two loads) a thread.

    - `op`: its name in messages.

    Raises ValueError for float32.
    """
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(f"{op} 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it")
    columns = pl.next_power_of_2(width)
    return Config(columns, num_warps=min(max(columns // 512, 1), 8), num_stages=1)


def rms_norm(x, weights, layer, eps):
    width = x.shape[-1]
    config = configuration(width, jnp.promote_types(x.dtype, weights.dtype))
    rows = math.prod(x.shape[:-1])
    out = triton_call(
        functools.partial(_kernel, eps=eps, config=config),
        name="rms_norm",
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(scalar(layer), x.reshape(rows, width), weights)
    return out.reshape(x.shape)


def _kernel(layer, x, weights, out, *, eps, config):
    """Program t normalises row t.

    Writes: program t alone writes out[t].
    """
    t, width = pl.program_id(0), x.shape[1]
    columns = pl.ds(0, config.columns)
    mask = None if width == config.columns else jnp.arange(config.columns) < width
    other = None if mask is None else 0
    wide = plgpu.load(x.at[t, columns], mask=mask, other=other).astype(jnp.float32)
    weight = plgpu.load(weights.at[layer[0], columns], mask=mask, other=other)
    scale = lax.rsqrt(sum_of_squares(wide) / width + eps)
    plgpu.store(out.at[t, columns], weight * (wide * scale).astype(out.dtype), mask=mask)


def sum_of_row(values: jax.Array) -> jax.Array:
    """The sum over the last axis, whose size is a power of two: neighbours are added, then
    neighbouring pairs, and so on.

    Each addition has two operands, so the order does not depend on which thread holds a value, and
    all kernels that normalise a row have the same bits. A tile whose first column is a multiple of
    its width, a power of two, is a subtree. So the sum of a row is the sum of its tiles' sums, for
    any width, and zeros after the last column change nothing.
    """
    while (size := values.shape[-1]) > 1:
        pairs = values.reshape(*values.shape[:-1], size // 2, 2)
        # Triton cannot index a tensor; XLA would merge several reductions into one.
        values = pairs[..., 0] + pairs[..., 1] if is_interpreted() else jnp.sum(pairs, axis=-1)
    return values[..., 0] if is_interpreted() else jnp.sum(values, axis=-1)


def tile_squares(x, tile):
    """tile_squares of the api."""
    rows, width = x.shape
    warps = configuration(tile, x.dtype, "tile_squares").num_warps
    return triton_call(
        functools.partial(_squares_kernel, tile=tile),
        name="tile_squares",
        grid=(rows, pl.cdiv(width, tile)),
        out_shape=jax.ShapeDtypeStruct((rows, pl.cdiv(width, tile)), jnp.float32),
        num_warps=warps,
        num_stages=1,
    )(x)


def _squares_kernel(x, out, *, tile):
    """Program (t, j) sums up tile j of row t.

    Writes: program (t, j) alone writes out[t, j].
    """
    t, j, width = pl.program_id(0), pl.program_id(1), x.shape[1]
    mask = edge_mask(j * tile, tile, width)
    values = plgpu.load(
        x.at[t, pl.ds(j * tile, tile)], mask=mask, other=None if mask is None else 0
    )
    plgpu.store(out.at[t, j], sum_of_squares(values))


def sum_of_squares(values: jax.Array) -> jax.Array:
    """sum_of_row of the squares. Squares of 16-bit values are exact in float32, so bits depend only
    on the order of their sums."""
    wide = values.astype(jnp.float32)
    return sum_of_row(wide * wide)
