"""short_conv as one Triton-lowered kernel: a program for some columns of a run, or of all runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.state_kernels import (
    Where,
    barrier,
    begins,
    check_dtype,
    each_run,
    place,
    sigmoid,
    sources,
    state_call,
    targets,
)
from pallas_kernels.state_pages import StatePage
from pallas_kernels.triton import power_of_two_divisor, scalar, tile_mask


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int
    """Tokens of a tile. No bit depends on it, since columns and tokens are computed one by one."""
    columns: int
    num_warps: int


def configuration(size: int, width: int) -> Config:
    """The tile for runs of so many tokens: 128 bits of x a thread. A step of many tokens has few
    columns a program, since a program takes all of its tokens. The columns divide all, so that
    none is masked."""
    tokens = min(pl.next_power_of_2(size), 32)
    columns = power_of_two_divisor(width, max(256 // tokens, 64))
    return Config(tokens, columns, num_warps=max(tokens * columns // 512, 1))


class Inputs(NamedTuple):
    """Operands of the convolution, or a kernel's refs to them: see ConvWeights."""

    x: Any
    weights: Any
    stack_layer: Any
    bias: Any


def short_conv(x, weights, arena, sequences, layer, options):
    inputs = Inputs(x, weights.weights, scalar(weights.stack_layer), weights.bias)
    where = Where.of(sequences, layer)
    return convolve("short_conv", inputs, arena, where, options.page, silu=options.silu)


def convolve(
    name: str,
    inputs: Inputs,
    arena: jax.Array,
    where: Where,
    page: StatePage,
    *,
    silu: bool,
    behind: int = 0,
    source: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The convolution. Returns (out [T, W], arena).

    - `inputs`: x has W columns or more.
    - `behind`: uint16 elements of the op's state before the last inputs.
    - `source`: columns int32[C] → where they are in x; None: there.
    """
    x, width = inputs.x, inputs.weights.shape[1]
    check_dtype(name, x.dtype)
    runs = where.start.shape[0]
    config = configuration(x.shape[0] // max(runs, 1), width)
    kernel = functools.partial(
        _kernel,
        config=config,
        page=page,
        silu=silu,
        behind=behind,
        source=source,
        runs=runs,
    )
    out = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    tiles = width // config.columns
    options = {"name": name, "tiles": tiles, "out": out, "num_warps": config.num_warps}
    return state_call(kernel, inputs, arena, where, page, **options)


def _kernel(inputs, where, _, out, arena, *, config, page, silu, behind, source, runs):
    """Some columns, of one run or of all.

    Writes: program (n, i) alone reads and writes its columns of the last inputs, and out[:, its
    columns].
    """
    x, stack, stack_layer, bias = inputs
    (_, width, taps), dtype, size = stack.shape, x.dtype, x.shape[0] // runs
    first = pl.program_id(1) * config.columns
    column = first + jnp.arange(config.columns)
    read = column if source is None else source(column)

    def of_column(ref):
        return plgpu.load(ref).astype(jnp.float32)

    # The newest token's weights first.
    weights = [of_column(stack.at[stack_layer[0], column, taps - 1 - tap]) for tap in range(taps)]
    added = None if bias is None else of_column(bias.at[stack_layer[0], column])

    def at(table, n, tap):
        where_to = place(table, n, where.layer, page, behind + tap * width + column)
        return arena.at[where_to]

    def earlier(n, row, old):
        """x of a row, and where that is before the run's new tokens, of the last inputs."""
        new = row >= where.skip[n]
        mask = tile_mask(new, None, (row.shape[0], config.columns))
        found = plgpu.load(x.at[(n * size + row)[:, None], read[None]], mask=mask, other=0)
        for tap, kept in enumerate(old):
            here = (row == where.skip[n] - 1 - tap)[:, None]
            found = jnp.where(here, kept[None], found)
        return found

    def of_run(n):
        begin, length = where.skip[n], where.length[n]
        known = jnp.broadcast_to(jnp.logical_not(begins(where, n)), column.shape)
        old = [
            plgpu.load(at(sources(where), n, tap), mask=known, other=0) for tap in range(taps - 1)
        ]
        old = [lax.bitcast_convert_type(each, dtype) for each in old]

        def of_block(b, _):
            row = begin + b * config.tokens + jnp.arange(config.tokens)
            # Rows behind the run repeat its last one.
            token = jnp.minimum(row, length - 1)
            total = earlier(n, token, old).astype(jnp.float32) * weights[0][None]
            for tap in range(1, taps):
                total += earlier(n, token - tap, old).astype(jnp.float32) * weights[tap][None]
            result = (total if added is None else total + added[None]).astype(dtype)
            if silu:
                wide = result.astype(jnp.float32)
                result = (wide * sigmoid(wide)).astype(dtype)
            mask = tile_mask(row < length, None, result.shape)
            plgpu.store(out.at[(n * size + row)[:, None], column[None]], result, mask=mask)

        blocks = lax.div(length - begin + config.tokens - 1, jnp.int32(config.tokens))
        lax.fori_loop(0, blocks, of_block, None)
        last = [earlier(n, length - 1 - tap + jnp.arange(1), old) for tap in range(taps - 1)]
        barrier()  # all have read before any writes
        for table in targets(where):
            written = jnp.broadcast_to(table[n, 0] >= 0, column.shape)
            for tap, each in enumerate(last):
                bits = lax.bitcast_convert_type(each, jnp.uint16).reshape(config.columns)
                plgpu.store(at(table, n, tap), bits, mask=written)

    each_run(where, of_run)
