"""The products of Mosaic kernels: 64 rows by some columns, summed in order over tiles of the depth.

GPUs of compute capability 9.0 multiply by wgmma, others by mma.sync. Tiles arrive by TMA from 9.0
on, before by cp.async. A sum's order is the same on all of them.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import get_arch
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a product: the fewest of wgmma. A row's bits depend on none of the others."""

DEPTH = 64
"""Of a tile: 128 bytes, the widest that shared memory swizzles."""

STAGES = 4
"""Tiles in flight: 64 KiB with 64 columns of one product and 96 KiB of two, which fit every GPU; 96
and 160 KiB with 128 columns."""

TILED = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH))


def has_wgmma() -> bool:
    """Whether the GPU that is compiled for has wgmma; an interpreted kernel has it."""
    return get_arch().major == 9


def most_columns() -> int:
    """Columns of a product that keep its sums, and with mma.sync the weights, in registers."""
    return 128 if has_wgmma() else 64


def products(x: Any, weights: Sequence[Any], columns: int, *, down: bool = False) -> list[Any]:
    """float32[64, columns] of x times each of the weights.

    - `x`: ref to [64, K] in device memory.
    - `weights`: one or two refs to [columns, K]; `down`: to [K, columns].
    """
    steps = x.shape[1] // DEPTH
    of_x = plgpu.BlockSpec((ROWS, DEPTH), lambda k: (0, k), transforms=TILED)
    block = plgpu.BlockSpec((columns, DEPTH), lambda k: (0, k), transforms=TILED)
    if down:
        block = plgpu.BlockSpec((DEPTH, columns), lambda k: (k, 0), transforms=TILED)
    specs = [of_x, *[block] * len(weights)]
    pipeline = functools.partial(
        plgpu.emit_pipeline, grid=(steps,), in_specs=specs, max_concurrent_steps=min(STAGES, steps)
    )

    def turned(of):
        return of if down else of.transpose((1, 0))

    def add(_, tile, *of_and_totals):
        *of, totals = of_and_totals
        rows = tile[...]
        return [
            plgpu.mma(total, rows, turned(one)[...]) for total, one in zip(totals, of, strict=True)
        ]

    def accumulate(*totals):
        def add(_, tile, *of):
            for total, one in zip(totals, of, strict=True):
                plgpu.wgmma(total, tile, turned(one))
            plgpu.wgmma_wait(0)

        pipeline(add)(x, *weights)
        return [total[...] for total in totals]

    if has_wgmma():
        return pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, columns))] * len(weights))
    zeros = [jnp.zeros((ROWS, columns), jnp.float32)] * len(weights)
    return pipeline(add, init_carry=zeros)(x, *weights)
