"""combine as one Triton-lowered kernel: a token's experts are read once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import KERNEL_DTYPES, triton_call


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
    return Config(min(256, pl.next_power_of_2(hidden)), num_warps=2, num_stages=1)


def combine(residual, y, weights, index=None):
    """As of the api; index: of combine_and_count."""
    tokens, hidden = residual.shape
    config = configuration(hidden, residual.dtype)
    out, counted = jax.ShapeDtypeStruct(residual.shape, residual.dtype), index is not None
    return triton_call(
        functools.partial(_counting_kernel if counted else _kernel, config=config),
        name="combine",
        grid=(tokens, pl.cdiv(hidden, config.columns)),
        out_shape=(out, jax.ShapeDtypeStruct((1,), jnp.int32)) if counted else out,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={3: 1} if counted else None,
    )(residual, y.reshape(-1, hidden), weights, *((index,) if counted else ()))


def _counting_kernel(residual, y, weights, _, out, index, *, config):
    """As _kernel; program (0, 0) alone reads index and writes it, a barrier between."""
    _kernel(residual, y, weights, out, config=config)

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        layer = index[0]
        plgpu.debug_barrier()
        index[0] = layer + 1


def _kernel(residual, y, weights, out, *, config):
    """Program (t, j) computes column tile j of token t; k ascends, the residual comes last.

    Writes: program (t, j) alone writes out[t, j·columns:(j+1)·columns].
    """
    t, first = pl.program_id(0), pl.program_id(1) * config.columns
    columns, hidden, top_k = pl.ds(first, config.columns), out.shape[1], weights.shape[1]
    mask = None if hidden % config.columns == 0 else first + jnp.arange(config.columns) < hidden

    def load(rows, row):
        return plgpu.load(rows.at[row, columns], mask=mask, other=None if mask is None else 0)

    total = load(y, t * top_k) * weights[t, 0]  # y is [T · K, D] here
    for k in range(1, top_k):
        total = total + load(y, t * top_k + k) * weights[t, k]
    total = load(residual, t).astype(jnp.float32) + total
    plgpu.store(out.at[t, columns], total.astype(out.dtype), mask=mask)
