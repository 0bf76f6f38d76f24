"""The one way the Triton-lowered kernels are called."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

KERNEL_DTYPES = ("bfloat16", "float16")
"""What the Pallas kernels compute in: a float32 product would be rounded to TF32."""

_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels traced in this context run in Pallas's interpreter, on any device: for tests.

    It runs the programs of a grid one after the other, so it proves nothing about races.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def is_interpreted() -> bool:
    """Whether kernels traced now will be interpreted."""
    return _interpreted.get()


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A callable over whole arrays: the kernel gets a ref to each operand and each result, and does
    its own tiling by program ids.

    kernel: its refs are operands, which may be pytrees, then results (an aliased result's operand
    ref must not be used).
    name: in profiles and HLO. grid: programs per axis. out_shape: jax.ShapeDtypeStruct or a tuple
    of them. num_warps, num_stages: given explicitly, since jax's default backend differs between
    versions. aliases: operand → result that is updated in place, operands counted
    by their leaves.
    """

    def call(*operands: Any) -> Any:
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=jax.tree.map(lambda _: whole, list(operands)),
            out_specs=jax.tree.map(lambda _: whole, out_shape),
            out_shape=out_shape,
            input_output_aliases=dict(aliases or {}),
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=is_interpreted(),
            name=name,
        )(*operands)

    return call


def scalar(number: jax.typing.ArrayLike) -> jax.Array:
    """int32[1] of a number, which is how kernels take one."""
    return jnp.reshape(jnp.asarray(number, jnp.int32), 1)


def edge_mask(first: jax.Array, size: int, end: int) -> jax.Array | None:
    """Which of `size` places from `first` on, a multiple of size, lie before `end`; None where all
    of such tiles do."""
    return first + jnp.arange(size) < end if end % size else None


def load_tile(ref: Any, row_mask: jax.Array | None, column_mask: jax.Array | None) -> jax.Array:
    """A tile [R, C] of an array, zero where one of the masks [R] and [C] is false. A mask is None
    where the sizes say that it would be all true."""
    mask = tile_mask(row_mask, column_mask, ref.shape)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def sum_over_depth(
    add: Callable[..., jax.Array], total: jax.Array, inputs: int, depth: int
) -> jax.Array:
    """total + add(0, total, None) + …: tiles of so many of the inputs in ascending order, the last
    one with the mask of what is left of them."""
    whole, rest = divmod(inputs, depth)
    total = lax.fori_loop(0, whole, functools.partial(add, depth_mask=None), total)
    if rest:  # a loop, since a static slice must not reach beyond its array
        last = functools.partial(add, depth_mask=jnp.arange(depth) < rest)
        total = lax.fori_loop(whole, whole + 1, last, total)
    return total


def tile_mask(
    rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, ...]
) -> jax.Array | None:
    """The mask of a tile from those of its rows and of its columns, None if it has neither."""
    masks = [] if rows is None else [jnp.broadcast_to(rows[:, None], shape)]
    masks += [] if columns is None else [jnp.broadcast_to(columns[None, :], shape)]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def power_of_two_divisor(number: int, most: int) -> int:
    """The largest power of two that divides number and is at most `most`: a tile without masks."""
    return min(number & -number, most)
