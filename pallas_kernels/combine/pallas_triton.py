"""combine as one Triton-lowered kernel: a token's experts are read once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.rms_norm.pallas_triton import sum_of_squares
from pallas_kernels.triton import KERNEL_DTYPES, triton_call

TILE = 256
"""Columns of a program."""

SQUARES_TILE = 64
"""Columns of a tile of squares: those of a program of the experts' last product, or half of them.
That product may combine in place of this kernel."""


@dataclasses.dataclass(frozen=True)
class Config:
    columns: int
    num_warps: int
    num_stages: int


def configuration(hidden: int, dtype: jax.typing.DTypeLike) -> Config:
    """One 128-bit load of y per thread and expert, so that one token spreads over many programs.

    dtype: of the residual. Raises ValueError for float32.
    """
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(f"combine 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it")
    return Config(min(TILE, pl.next_power_of_2(hidden)), num_warps=2, num_stages=1)


def combine(residual, y, weights, index=None, with_squares=False):
    """combine of the api.

    - `index`: as in combine_and_count.
    - `with_squares`: as in combine_with_squares.

    Returns one array if only the sum is wanted, otherwise a tuple.
    """
    tokens, hidden = residual.shape
    config = configuration(hidden, residual.dtype)
    tiles, counted = pl.cdiv(hidden, SQUARES_TILE), index is not None
    outs = [jax.ShapeDtypeStruct(residual.shape, residual.dtype)]
    outs += [jax.ShapeDtypeStruct((tokens, tiles), jnp.float32)] * with_squares
    outs += [jax.ShapeDtypeStruct((1,), jnp.int32)] * counted
    return triton_call(
        functools.partial(_counting_kernel if counted else _kernel, config=config),
        name="combine",
        grid=(tokens, pl.cdiv(hidden, config.columns)),
        out_shape=tuple(outs) if len(outs) > 1 else outs[0],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={3: len(outs) - 1} if counted else None,
    )(residual, y.reshape(-1, hidden), weights, *((index,) if counted else ()))


def _counting_kernel(residual, y, weights, _, *outs, config):
    """_kernel, in which program (0, 0) alone reads `index`, the last of `outs`, and writes it after
    a barrier."""
    *outs, index = outs
    _kernel(residual, y, weights, *outs, config=config)

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        move_on(index)


def move_on(index: Any) -> None:
    """Adds 1 to index[0], by one program."""
    layer = index[0]
    plgpu.debug_barrier()
    index[0] = layer + 1


def _kernel(residual, y, weights, out, *out_squares, config):
    """Program (t, j) computes column tile j of token t. k ascends, and the residual comes last.

    - `out_squares`: one array or none.

    Writes: program (t, j) alone writes out[t, j·columns:(j+1)·columns] and the squares of
    those columns.
    """
    t, first = pl.program_id(0), pl.program_id(1) * config.columns
    columns, hidden, top_k = pl.ds(first, config.columns), out.shape[1], weights.shape[1]
    mask = None if hidden % config.columns == 0 else first + jnp.arange(config.columns) < hidden

    def load(rows, row):
        return plgpu.load(rows.at[row, columns], mask=mask, other=None if mask is None else 0)

    # y is [T · K, D] here.
    parts = ((load(y, t * top_k + k), weights[t, k]) for k in range(top_k))
    result = weighted_sum(parts, lambda: load(residual, t)).astype(out.dtype)
    plgpu.store(out.at[t, columns], result, mask=mask)
    for to in out_squares:  # of what is stored; zeros behind the last column
        at, squares = squares_of(result, first)
        plgpu.store(to.at[t, at], squares, mask=at < to.shape[1])


def squares_of(values: jax.Array, first: Any) -> tuple[jax.Array, jax.Array]:
    """Which tiles of squares the columns from `first` on are, int32[N], and their sums,
    float32[…, N]."""
    tile = min(SQUARES_TILE, values.shape[-1])
    tiles = values.reshape(*values.shape[:-1], -1, tile)
    return first // SQUARES_TILE + jnp.arange(tiles.shape[-2]), sum_of_squares(tiles)


def weighted_sum(
    parts: Iterable[tuple[jax.Array, jax.Array]], residual: Callable[[], jax.Array]
) -> jax.Array:
    """The residual plus the parts times their weights, in float32 and in combine's order."""
    (first, weight), *others = parts
    total = first * weight
    for part, weight in others:
        total = total + part * weight
    return residual().astype(jnp.float32) + total
