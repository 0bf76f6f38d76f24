"""The function that calls every Triton-lowered kernel, and parts that kernels share."""

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

from pallas_kernels import plgpu

KERNEL_DTYPES = ("bfloat16", "float16")
"""Dtypes of the Pallas kernels. A float32 product would be rounded to TF32."""

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
    """Makes a callable over whole arrays. The kernel gets a ref to each operand and each result,
    and cuts tiles itself by program ids.

    - `kernel`: takes refs to operands, which may be pytrees, then to results. It must not use the
      operand ref of an aliased result.
    - `name`: in profiles and HLO.
    - `grid`: programs along each axis.
    - `out_shape`: jax.ShapeDtypeStruct or a tuple of them.
    - `num_warps`, `num_stages`: explicit, since jax's default backend differs between versions.
    - `aliases`: operand → result that is updated in place; operands are counted by leaves.
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
    """int32[1] of a number: the form in which kernels take numbers."""
    return jnp.reshape(jnp.asarray(number, jnp.int32), 1)


def edge_mask(first: jax.Array, size: int, end: int) -> jax.Array | None:
    """Which of `size` places from `first` on (a multiple of size) are before `end`; None: in every
    tile all are."""
    return first + jnp.arange(size) < end if end % size else None


def load_tile(ref: Any, row_mask: jax.Array | None, column_mask: jax.Array | None) -> jax.Array:
    """Loads a tile [R, C] of an array, zero where one of the masks [R] and [C] is false. A mask is
    None if it would be true everywhere."""
    mask = tile_mask(row_mask, column_mask, ref.shape)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def sum_over_depth(
    add: Callable[..., jax.Array], total: jax.Array, inputs: int, depth: int
) -> jax.Array:
    """Calls total = add(first, total, mask) for the tiles of the inputs in ascending order. Only
    the last tile may have a mask."""
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


def check_counters(counters: jax.Array, least: int, of: str) -> None:
    """Raises ValueError unless counters are int32[C] with C ≥ `least`.

    - `of`: what is counted, for the message.
    """
    if counters.ndim != 1 or counters.dtype != jnp.int32:
        raise ValueError(f"counters are int32[C], not {counters.dtype}{[*counters.shape]}")
    if counters.size < least:
        raise ValueError(f"counters {counters.shape} are fewer than the {least} of {of}")


def is_last(counters: Any, at: tuple[jax.Array, ...], programs: jax.Array | int) -> jax.Array:
    """Whether this program is the last of `programs` to call this. Only the last one may read what
    the others stored before their call.

    It counts with acquire and release. So all threads of the last program see, after the barrier of
    the broadcast, what one thread of each program saw at the barrier before (PTX ISA, "Memory
    consistency model"). Which program is the last varies, and results must not depend on it.

    - `counters`: int32, 0 at `at` before the first call and after the last.
    - `at`: traced numbers, for Pallas's interpreter.
    """
    if not is_interpreted():  # which runs programs one after the other
        plgpu.debug_barrier()
    last = plgpu.atomic_add(counters, at, jnp.int32(1)) == jnp.asarray(programs, jnp.int32) - 1

    @pl.when(last)
    def _():
        plgpu.store(counters.at[at], jnp.int32(0))

    return last


def are_last(flags: Any, at: jax.Array, bits: jax.Array, every: int, mask: jax.Array) -> jax.Array:
    """is_last at several places: at which places of `at` this program's bits complete int32
    `every`. Each program sets different bits.

    It sets bits instead of counting, since Pallas lowers additions of integer vectors as additions
    of floats (jax 0.11.2).

    - `flags`: int32, 0 at these places before the first call and after the last.
    - `at`: different places where the mask is true. Where it is false, a place that no program
      uses, since Pallas's interpreter writes it too.
    """
    if is_interpreted():  # which knows neither masks nor `or`
        before = plgpu.load(flags.at[at], mask=mask, other=0)
        plgpu.store(flags.at[at], before | bits, mask=mask)
    else:
        plgpu.debug_barrier()
        before = plgpu.atomic_or(flags, (at,), bits, mask=mask)
    last = mask & ((before | bits) == every)
    plgpu.store(flags.at[at], jnp.zeros_like(bits), mask=last)
    if not is_interpreted():
        plgpu.debug_barrier()
    return last


def power_of_two_divisor(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides number: a tile that needs no mask."""
    return min(number & -number, most)
