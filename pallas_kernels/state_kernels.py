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

from pallas_kernels import plgpu
from pallas_kernels.state_pages import Sequences, StatePage
from pallas_kernels.triton import (
    KERNEL_DTYPES,
    is_interpreted,
    power_of_two_divisor,
    scalar,
    tile_mask,
    triton_call,
)

VALUES = 1024
"""Values of the matrices that a warp holds: 32 a thread. A program with one warp has no barrier in
the sums of its tokens."""

TOKENS = 16
"""Tokens by which runs of several rows advance matrices at once, by products of matrices: the rows
of their smallest tile. They begin at multiples of it in their sequence."""


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


def configuration(matrices: Matrices, page: StatePage, tokens: int) -> Tile:
    """The tile of a program that advances a matrix by so many tokens at once: all rows of some
    columns of one matrix; of a single token VALUES a warp.

    A token needs sums over rows, and nothing of other columns. The columns divide a KV row, so a
    row of the tile is contiguous.
    """
    rows, whole = pl.next_power_of_2(matrices.rows), _whole(matrices, page)
    if tokens > 1:  # with more columns, or fewer warps, the parts of products spill
        return Tile(max(rows, TOKENS), TOKENS, num_warps=8)
    columns = power_of_two_divisor(whole, max(VALUES // rows, 1))
    return Tile(rows, columns, num_warps=min(max(rows * columns // VALUES, 1), 8))


def _whole(matrices: Matrices, page: StatePage) -> int:
    """Columns whose divisors divide a matrix and a KV row."""
    return math.gcd(matrices.columns, page.row_elements // 2)


class Cut(NamedTuple):
    """What of a head's matrix a program has."""

    head: jax.Array
    row: jax.Array
    """int32[R]"""
    held: jax.Array | None
    """bool[R], which of these exist; None: all."""
    column: jax.Array
    """int32[C]"""


class OfTile(NamedTuple):
    """What a program computes with, made from its operands once."""

    load: Callable[..., Any]
    """A token's row → its inputs, a pytree of arrays. Of TOKENS: their rows, and which of these are
    new tokens, → inputs, 0 for all others."""
    step: Callable[..., tuple[jax.Array, jax.Array]]
    """(float32 matrix [rows, columns], inputs) → (the next one, the output [columns]). Of TOKENS:
    (matrix, inputs, which are new tokens) → (the next one, outputs [TOKENS, columns])."""


def advance_matrices(
    one: Callable[..., OfTile],
    several: Callable[..., OfTile] | None,
    operands: Any,
    arena: jax.Array,
    where: Where,
    page: StatePage,
    matrices: Matrices,
    *,
    name: str,
    out: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array]:
    """Advances the matrices of a step's runs: runs of one row token by token, as
    `state_pages.advance` does; others by TOKENS.

    Bits depend on the sequence's tokens, and on where its runs of several rows begin and end if
    that is within TOKENS; on nothing else of a step, since all goes through one loop body with one
    tile.

    - `one`, `several`: (operands, Cut) → OfTile, of a token and of TOKENS. Runs of several rows go
      token by token too if several is None, or if tiles would be too narrow for a product.
    - `out`: [T, heads · columns].

    Returns (out, arena). Raises ValueError for KV rows of odd length.
    """
    if page.row_elements % 2:
        raise ValueError(f"{name} 'pallas' takes KV rows of whole float32 values, not {page}")
    runs = where.start.shape[0]
    make, tokens = one, 1
    if several and out.shape[0] > runs and _whole(matrices, page) % TOKENS == 0:
        make, tokens = several, TOKENS
    tile = configuration(matrices, page, tokens)
    kernel = functools.partial(
        _advance, make=make, tokens=tokens, tile=tile, matrices=matrices, page=page, runs=runs
    )
    tiles = matrices.heads * (matrices.columns // tile.columns)
    options = {"name": name, "tiles": tiles, "out": out, "num_warps": tile.num_warps}
    return state_call(kernel, operands, arena, where, page, **options)


def _advance(operands, where, _, out, arena, *, make, tokens, tile, matrices, page, runs):
    """The columns of one tile of one head, of one run or of all.

    Writes: program (n, i) alone reads and writes its columns of its matrices, and out[:, its
    columns].
    """
    across = matrices.columns // tile.columns
    head, first = pl.program_id(1) // across, pl.program_id(1) % across * tile.columns
    row, column = jnp.arange(tile.rows), first + jnp.arange(tile.columns)
    held = None if tile.rows == matrices.rows else row < matrices.rows
    of_tile = make(operands, Cut(head, row, held, column))
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

    def tokens_of(n, length, b):
        """What `load` takes of block b of a run, and where its outputs go."""
        columns = head * matrices.columns + column
        if tokens == 1:
            token = n * size + jnp.minimum(b, length - 1)
            return (token,), out.at[token, columns], None
        row = b * tokens + jnp.arange(tokens)
        new, row = (row >= where.skip[n]) & (row < length), n * size + row
        mask = tile_mask(new, None, (tokens, tile.columns))
        return (row, new), out.at[row[:, None], columns[None]], mask

    def of_run(n):
        mask = masked(jnp.logical_not(begins(where, n)))
        state = _wide(plgpu.load(at(sources(where), n), mask=mask, other=0))
        length = where.length[n]
        given = functools.partial(tokens_of, n, length)

        def of_block(b, carry):
            state, inputs = carry
            # The next tokens' inputs are on their way while these are computed.
            following = of_tile.load(*given(b + 1)[0])
            (_, *new), to, mask = given(b)
            state, y = of_tile.step(state, inputs, *new)
            plgpu.store(to, y.astype(out.dtype), mask=mask)
            return state, following

        width = jnp.int32(tokens)
        begin, end = lax.div(where.skip[n], width), lax.div(length + tokens - 1, width)
        state, _ = lax.fori_loop(begin, end, of_block, (state, of_tile.load(*given(begin)[0])))
        bits = _halves(state)
        for table in targets(where):
            plgpu.store(at(table, n), bits, mask=masked(table[n, 0] >= 0))

    each_run(where, of_run)


def product(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    """The product of float32 matrices, each as the sum of two bfloat16 ones, without the product of
    the lesser ones: to 2^-16, where a GPU's own product of float32 is to 2^-11."""
    (a, a_rest), (b, b_rest) = _parts(a), _parts(b)
    small = plgpu.dot(a, b_rest, **transposed) + plgpu.dot(a_rest, b, **transposed)
    return small + plgpu.dot(a, b, **transposed)


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


class Decays(NamedTuple):
    """What the tokens of a block lose of a state, as logarithms. No exponent here is above 0."""

    lost: jax.Array
    """[TOKENS, rows or 1], by all tokens up to each."""
    in_all: jax.Array
    """[rows or 1], by all of the block."""

    @classmethod
    def of(cls, lost: jax.Array) -> Decays:
        """Of what each token alone loses."""
        return cls(jnp.cumsum(lost, axis=0), jnp.sum(lost, axis=0))

    @property
    def kept(self) -> jax.Array:
        """What is left of the state before the block at each token."""
        return jnp.exp(self.lost)

    def between(self) -> jax.Array:
        """What is left at token t of what token i ≤ t wrote, [TOKENS, TOKENS], if all rows decay
        alike."""
        return jnp.exp(jnp.minimum(self.lost - self.lost.reshape(1, TOKENS), 0))

    def advance(self, state: jax.Array, keys: jax.Array, changes: jax.Array) -> jax.Array:
        """The state after the block, to which each token adds the outer product of its key and its
        change."""
        left = keys * jnp.exp(jnp.minimum(self.in_all[None] - self.lost, 0))
        return state * jnp.exp(self.in_all)[:, None] + product(left, changes, trans_a=True)


def row_of(number: jax.Array, x: jax.Array) -> jax.Array:
    """Row number of a matrix, in registers."""
    here = jnp.arange(x.shape[0]) == number
    return jnp.sum(jnp.where(here[:, None], x, 0), axis=0)


def column_of(number: jax.Array, x: jax.Array) -> jax.Array:
    here = jnp.arange(x.shape[1]) == number
    return jnp.sum(jnp.where(here[None], x, 0), axis=1)


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
