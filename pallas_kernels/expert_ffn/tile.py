"""What the kernels of expert_ffn share: the sizes of tiles, and reading and writing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_LEAST = 16  # the shortest axis of a Triton product


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product's matrix is cut. columns: of the result, per program. depth: of one partial
    product; the sum runs over these in ascending order. num_warps, num_stages: of the kernel."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def fit(size: int, most: int) -> int:
    """The tile for an axis of `size`: the largest power of two up to `most` that divides it, or
    where that is too short for a product, a longer one whose last tile is masked."""
    divisor = min(size & -size, most)
    return divisor if divisor >= _LEAST else min(most, max(_LEAST, pl.next_power_of_2(size)))


def span(start: Any, size: int) -> jax.Array:
    """int32[size]: start, start + 1, …"""
    return start + jnp.arange(size, dtype=jnp.int32)


def read_rows(ref: Any, rows: jax.Array, start: Any, size: int) -> jax.Array:
    """ref[rows, start : start + size], zero past the last column."""
    columns = span(start, size)
    at = ref.at[rows[:, None], columns[None, :]]
    if ref.shape[1] % size == 0:
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.broadcast_to(columns < ref.shape[1], at.shape), other=0)


def write_rows(
    ref: Any, rows: jax.Array, start: Any, values: jax.Array, keep: jax.Array | None = None
) -> None:
    """ref[rows, start : start + size] = values, for the rows to keep and up to the last column."""
    columns = span(start, values.shape[1])
    mask = None if keep is None else jnp.broadcast_to(keep[:, None], values.shape)
    if ref.shape[1] % values.shape[1]:
        mask = (columns < ref.shape[1]) & (True if mask is None else mask)
        mask = jnp.broadcast_to(mask, values.shape)
    plgpu.store(ref.at[rows[:, None], columns[None, :]], values, mask=mask)


GATE, UP, DOWN = 0, 1, 2


class Record:
    """Tiles of one expert's record [3·width, hidden]: gate rows, up rows, rows of down^T.

    at(rows, columns): a ref to that part of the record, in its cell or in the store.
    """

    def __init__(self, at: Callable[[Any, Any], Any], width: int, hidden: int):
        self._at, self._width, self._hidden = at, width, hidden

    def read(self, matrix: int, row: Any, column: Any, shape: tuple[int, int]) -> jax.Array:
        """A tile of a matrix (GATE, UP or DOWN) from (row, column) on, zero outside it."""
        rows, columns = shape
        at = self._at(pl.ds(matrix * self._width + row, rows), pl.ds(column, columns))
        mask = None
        if self._width % rows:
            mask = jnp.broadcast_to((span(row, rows) < self._width)[:, None], shape)
        if self._hidden % columns:
            inside = jnp.broadcast_to(span(column, columns) < self._hidden, shape)
            mask = inside if mask is None else mask & inside
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


class Memory(NamedTuple):
    """Refs to where experts lie: the operands that every kernel has first."""

    layer: Any
    """int32[1]"""
    address: Any
    """int32[L, E]: arena row of an expert's record, −1 without a cell."""
    arena: Any
    """[rows, hidden]"""
    store: Any
    """[L, E, 3·width, hidden]"""

    def with_record(self, expert: jax.Array, body: Callable[[Record], None]) -> None:
        """Runs the body with the expert's record in its cell or, without one, in the store: the
        same arithmetic on the same bits."""
        layer = self.layer[0]
        address = self.address[layer, expert]
        width, hidden = self.store.shape[2] // 3, self.store.shape[3]

        def in_cell(rows: pl.Slice, columns: pl.Slice) -> Any:
            return self.arena.at[pl.ds(address + rows.start, rows.size), columns]

        def in_store(rows: pl.Slice, columns: pl.Slice) -> Any:
            return self.store.at[layer, expert, rows, columns]

        pl.when(address >= 0)(lambda: body(Record(in_cell, width, hidden)))
        pl.when(address < 0)(lambda: body(Record(in_store, width, hidden)))
