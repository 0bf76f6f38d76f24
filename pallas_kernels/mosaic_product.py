"""The product of Mosaic kernels: 64 rows by some columns, summed in order over tiles of the depth.

GPUs of compute capability 9.0 multiply by wgmma, others by mma.sync. Tiles arrive by TMA from 9.0
on, before by cp.async. A sum's order is the same on all of them.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import get_arch
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a product: the fewest of wgmma. A row's bits depend on none of the others."""

DEPTH = 64
"""Of a tile: 128 bytes, the widest that shared memory swizzles."""

STAGES = 4
"""Tiles in flight: 64 KiB with 64 columns, which fit every GPU, and 96 KiB with 128."""

TILED = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH))


def has_wgmma() -> bool:
    """Whether the GPU that is compiled for has wgmma; an interpreted kernel has it."""
    return get_arch().major == 9


def most_columns() -> int:
    """Columns of a product that keep its sums, and with mma.sync the weights, in registers."""
    return 128 if has_wgmma() else 64


def product(x: Any, weight: Any, columns: int) -> jax.Array:
    """float32[64, columns] of x times a weight.

    - `x`: ref to [64, K] in device memory.
    - `weight`: ref to [columns, K].
    """
    steps = x.shape[1] // DEPTH
    specs = [_block((rows, DEPTH)) for rows in (ROWS, columns)]
    pipeline = functools.partial(
        plgpu.emit_pipeline, grid=(steps,), in_specs=specs, max_concurrent_steps=min(STAGES, steps)
    )

    def add(_, tile, of, total):
        return plgpu.mma(total, tile[...], of.transpose((1, 0))[...])

    def accumulate(total):
        def add(_, tile, of):
            plgpu.wgmma(total, tile, of.transpose((1, 0)))
            plgpu.wgmma_wait(0)

        pipeline(add)(x, weight)
        return total[...]

    if has_wgmma():
        return pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns)))
    return pipeline(add, init_carry=jnp.zeros((ROWS, columns), jnp.float32))(x, weight)


def _block(shape: tuple[int, int]) -> plgpu.BlockSpec:
    return plgpu.BlockSpec(shape, lambda k: (0, k), transforms=TILED)
