"""What the kernels of ops with states share: places of a state in pages, the walk over runs, and
matrices that decay and get outer products added."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.state_pages import Sequences, StatePage
from pallas_kernels.triton import (
    KERNEL_DTYPES,
    is_interpreted,
    power_of_two_divisor,
    scalar,
    triton_call,
)

VALUES = 1024
"""Values of the matrices that a warp holds: 32 a thread. A program with one warp has no barrier in
the sums of its tokens."""


class Where(NamedTuple):
    """Where the states of a step's runs are, or a kernel's refs to it: see Sequences."""

    pages: Any
    read: Any
    copy: Any
    start: Any
    skip: Any
    length: Any
    count: Any
    layer: Any

    @classmethod
    def of(cls, sequences: Sequences, layer: Any) -> Where:
        pages, start, skip, length, count, read, copy = sequences
        return cls(pages, read, copy, start, skip, length, scalar(count), scalar(layer))


def check_dtype(op: str, dtype: jax.typing.DTypeLike) -> None:
    """Raises ValueError for a dtype that kernels do not compute in."""
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(f"{op} 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it")


def state_call(
    kernel: Callable[..., None],
    operands: Any,
    arena: jax.Array,
    where: Where,
    page: StatePage,
    *,
    name: str,
    tiles: int,
    out: jax.ShapeDtypeStruct,
    num_warps: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel of (operands, where, the arena's operand, out, arena in KV rows) on a grid of
    (runs, tiles). Returns (out, arena).

    If no run can read what another one writes, each is a program's; else a program takes all runs.
    """
    view = arena.reshape(-1, page.row_elements)
    runs = where.start.shape[0] if where.read is None else 1
    given = len(jax.tree.leaves((operands, where)))
    result, view = triton_call(
        kernel,
        name=name,
        grid=(runs, tiles),
        out_shape=(out, jax.ShapeDtypeStruct(view.shape, view.dtype)),
        num_warps=num_warps,
        num_stages=1,
        aliases={given: 1},
    )(operands, where, view)
    return result, view.reshape(arena.shape)


def each_run(where: Where, of_run: Callable[[jax.Array], None]) -> None:
    """Calls of_run(n) for the runs of this program that have new tokens, in order. What one writes,
    the next ones can read."""

    def run(n):
        pl.when(where.skip[n] < where.length[n])(lambda: of_run(n))

    if where.read is None:
        n = pl.program_id(0)
        pl.when(n < where.count[0])(lambda: run(n))
        return

    def in_order(n, _):
        run(n)
        barrier()

    lax.fori_loop(0, where.count[0], in_order, None)


def barrier() -> None:
    """Orders this program's accesses to memory before it and behind it."""
    if not is_interpreted():  # which has no threads
        plgpu.debug_barrier()


def begins(where: Where, n: jax.Array) -> jax.Array:
    """Whether run n begins its sequence, from zeros."""
    return where.start[n] + where.skip[n] == 0


def sources(where: Where) -> Any:
    """The pages from which runs read."""
    return where.pages if where.read is None else where.read


def targets(where: Where) -> list[Any]:
    """The pages that get a run's state: its own, and those of a copy."""
    return [where.pages] if where.copy is None else [where.pages, where.copy]


def place(
    table: Any, n: jax.Array, layer: Any, page: StatePage, element: jax.Array, held: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(KV row, column) of uint16 elements of the op's state in the pages of run n.

    - `held`: which elements exist; None: all.
    """
    row, column = divided(element, page.row_elements)
    number, row = divided(layer[0] * page.layer_rows + page.first_row + row, page.page_rows)
    first = plgpu.load(table.at[n, number], mask=held, other=None if held is None else 0)
    return first + row, column


def divided(numbers: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotients and remainders of numbers of at least 0."""
    each = jnp.full_like(numbers, by)
    return lax.div(numbers, each), lax.rem(numbers, each)


class Matrices(NamedTuple):
    """The matrices of a state: [heads, rows, columns] of float32, at its beginning."""

    heads: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    """Rows of a matrix, padded."""
    columns: int
    """Columns of a program."""
    num_warps: int


def configuration(matrices: Matrices, page: StatePage) -> Tile:
    """The tile of a program: all rows of some columns of one matrix, VALUES a warp.

    A token needs sums over rows, and nothing of other columns. The columns divide a KV row, so a
    row of the tile is contiguous.
    """
    rows = pl.next_power_of_2(matrices.rows)
    whole = math.gcd(matrices.columns, page.row_elements // 2)
    columns = power_of_two_divisor(whole, max(VALUES // rows, 1))
    return Tile(rows, columns, num_warps=min(max(rows * columns // VALUES, 1), 8))


class OfTile(NamedTuple):
    """What a program computes with, made from its operands once."""

    load: Callable[[jax.Array], Any]
    """A token's row → its inputs, a pytree of arrays."""
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    """(float32 matrix [rows, columns], inputs) → (the next one, the output [columns])."""


def advance_matrices(
    make: Callable[..., OfTile],
    operands: Any,
    arena: jax.Array,
    where: Where,
    page: StatePage,
    matrices: Matrices,
    *,
    name: str,
    out: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array]:
    """Advances the matrices of a step's runs token by token, as `state_pages.advance` does.

    A token's bits do not depend on its run: every token goes through one loop body with one tile.

    - `make`: (operands, head, rows int32[R], which of these exist or None, columns int32[C]) →
      OfTile.
    - `out`: [T, heads · columns].

    Returns (out, arena). Raises ValueError for KV rows of odd length.
    """
    if page.row_elements % 2:
        raise ValueError(f"{name} 'pallas' takes KV rows of whole float32 values, not {page}")
    tile = configuration(matrices, page)
    kernel = functools.partial(
        _advance, make=make, tile=tile, matrices=matrices, page=page, runs=where.start.shape[0]
    )
    tiles = matrices.heads * (matrices.columns // tile.columns)
    options = {"name": name, "tiles": tiles, "out": out, "num_warps": tile.num_warps}
    return state_call(kernel, operands, arena, where, page, **options)


def _advance(operands, where, _, out, arena, *, make, tile, matrices, page, runs):
    """The columns of one tile of one head, of one run or of all.

    Writes: program (n, i) alone reads and writes its columns of its matrices, and out[:, its
    columns].
    """
    across = matrices.columns // tile.columns
    head, first = pl.program_id(1) // across, pl.program_id(1) % across * tile.columns
    row, column = jnp.arange(tile.rows), first + jnp.arange(tile.columns)
    held = None if tile.rows == matrices.rows else row < matrices.rows
    of_tile = make(operands, head, row, held, column)
    size = out.shape[0] // runs
    elements = 2 * ((head * matrices.rows + row) * matrices.columns + first)
    halves = jnp.arange(2 * tile.columns)

    def at(table, n):
        rows, columns = place(table, n, where.layer, page, elements, held)
        return arena.at[rows[:, None], columns[:, None] + halves[None]]

    def masked(condition):
        shape = tile.rows, 2 * tile.columns
        mask = jnp.broadcast_to(condition, shape)
        return mask if held is None else mask & held[:, None]

    def of_run(n):
        mask = masked(jnp.logical_not(begins(where, n)))
        state = _wide(plgpu.load(at(sources(where), n), mask=mask, other=0))
        length = where.length[n]

        def of_token(t, carry):
            state, inputs = carry
            # The next token's inputs are on their way while this one is computed.
            following = of_tile.load(n * size + jnp.minimum(t + 1, length - 1))
            state, y = of_tile.step(state, inputs)
            at_token = out.at[n * size + t, head * matrices.columns + column]
            plgpu.store(at_token, y.astype(out.dtype))
            return state, following

        begin = where.skip[n]
        carry = state, of_tile.load(n * size + begin)
        state, _ = lax.fori_loop(begin, length, of_token, carry)
        bits = _halves(state)
        for table in targets(where):
            plgpu.store(at(table, n), bits, mask=masked(table[n, 0] >= 0))

    each_run(where, of_run)


def _wide(halves: jax.Array) -> jax.Array:
    """float32[R, C] of its uint16[R, 2 · C]."""
    rows, columns = halves.shape[0], halves.shape[1] // 2
    low, high = jnp.split(halves.reshape(rows, columns, 2), 2, axis=2)
    low, high = (x.reshape(rows, columns).astype(jnp.uint32) for x in (low, high))
    return lax.bitcast_convert_type(low | (high << jnp.uint32(16)), jnp.float32)


def _halves(wide: jax.Array) -> jax.Array:
    """uint16[R, 2 · C] of float32[R, C]."""
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    low, high = (x.astype(jnp.uint16) for x in (bits & jnp.uint32(0xFFFF), bits >> jnp.uint32(16)))
    return jnp.stack([low, high], axis=-1).reshape(wide.shape[0], 2 * wide.shape[1])


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), without overflow."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))
