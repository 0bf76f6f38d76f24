"""The product of Mosaic kernels: 64 rows by some columns, summed in order over tiles of the depth.

GPUs of compute capability 9.0 multiply by wgmma, others by mma.sync. Tiles arrive by TMA from 9.0
on, before by cp.async. A sum's order is the same on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


def products(
    x: Any, weights: Sequence[Any], columns: int, *, by_depth: bool = False
) -> list[jax.Array]:
    """float32[64, columns] of x times each of the weights.

    - `x`: ref to [64, K] in device memory.
    - `weights`: refs to [columns, K], or to [K, columns] with `by_depth`.
    """
    count, steps = len(weights), x.shape[1] // DEPTH
    block, index = (columns, DEPTH), lambda k: (0, k)
    if by_depth:
        block, index = (DEPTH, columns), lambda k: (k, 0)
    specs = [_block((ROWS, DEPTH), lambda k: (0, k)), *[_block(block, index)] * count]
    pipeline = functools.partial(
        plgpu.emit_pipeline, grid=(steps,), in_specs=specs, max_concurrent_steps=min(STAGES, steps)
    )

    def turned(weight: Any) -> Any:
        return weight if by_depth else weight.transpose((1, 0))

    def add(_, tile, *rest):
        *tiles, totals = rest
        of_x = tile[...]
        return tuple(
            plgpu.mma(total, of_x, turned(of)[...]) for total, of in zip(totals, tiles, strict=True)
        )

    def accumulate(*totals):
        def add(_, tile, *tiles):
            for total, of in zip(totals, tiles, strict=True):
                plgpu.wgmma(total, tile, turned(of))
            plgpu.wgmma_wait(0)

        pipeline(add)(x, *weights)
        return [total[...] for total in totals]

    if has_wgmma():
        return pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, columns))] * count)
    zeros = (jnp.zeros((ROWS, columns), jnp.float32),) * count
    return list(pipeline(add, init_carry=zeros)(x, *weights))


def _block(shape: tuple[int, int], index: Any) -> plgpu.BlockSpec:
    return plgpu.BlockSpec(shape, index, transforms=TILED)
