"""What the kernels of expert_ffn share: the sizes of tiles, and reading and writing them."""

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
from pallas_kernels.records.format import MATRICES, RecordFormat
from pallas_kernels.records.tile import (
    DOWN,
    GATE,
    UP,
    Plane,
    plane_size,
    read_lossless,
    read_planes,
    span,
)
from pallas_kernels.records.versions import Formats

__all__ = [
    "DOWN",
    "GATE",
    "UP",
    "Memory",
    "Plane",
    "Record",
    "Tile",
    "fit",
    "read_rows",
    "span",
    "write_rows",
]

_LEAST = 16  # the shortest axis of a Triton product


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product's matrix is cut.

    - `columns`: of the result, per program.
    - `depth`: of one partial product; partial products are added in ascending order.
    - `num_warps`, `num_stages`: of the kernel.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def fit(size: int, most: int) -> int:
    """The tile for an axis of `size`: the largest power of two up to `most` that divides it. If
    that is too short for a product, a longer tile, the last one masked."""
    divisor = min(size & -size, most)
    return divisor if divisor >= _LEAST else min(most, max(_LEAST, pl.next_power_of_2(size)))


def read_rows(ref: Any, rows: jax.Array, start: Any, size: int, end: Any = None) -> jax.Array:
    """ref[rows, start : start + size], zero from `end` on (default: past the last column)."""
    columns = span(start, size)
    at = ref.at[rows[:, None], columns[None, :]]
    if end is None:
        if ref.shape[1] % size == 0:
            return plgpu.load(at)
        end = ref.shape[1]
    return plgpu.load(at, mask=jnp.broadcast_to(columns < end, at.shape), other=0)


def write_rows(
    ref: Any, rows: jax.Array, start: Any, values: jax.Array, keep: jax.Array | None = None
) -> None:
    """Sets ref[rows, start : start + size] to values, for rows to keep and up to the last
    column."""
    columns = span(start, values.shape[1])
    mask = None if keep is None else jnp.broadcast_to(keep[:, None], values.shape)
    if ref.shape[1] % values.shape[1]:
        mask = (columns < ref.shape[1]) & (True if mask is None else mask)
        mask = jnp.broadcast_to(mask, values.shape)
    plgpu.store(ref.at[rows[:, None], columns[None, :]], values, mask=mask)


def code_depth(fmt: RecordFormat, matrix: int, depth: int) -> int:
    """Elements of codes that one load takes along the summed axis, where a dense tile has `depth`.
    P planes of weights and of x are in registers at once. More than 64 elements of int8 spill with
    64 rows. No more than a group, so that weights of a result share their scale."""
    group = max(_LEAST, fmt.group_of(MATRICES[matrix]))
    return fit(
        plane_size(fmt, matrix), min(depth, 64, 256 // fmt.planes_of(MATRICES[matrix]), group)
    )


At = Callable[[Any, Any], Any]
"""at(rows, columns): a ref to elements of a record, rows and columns slices or arrays."""


class Record:
    """One expert's record, in its cell or in the store, read by tiles.

    - `at`: gives refs to weights if the format is dense, otherwise to uint16.
    """

    def __init__(self, at: At, fmt: RecordFormat):
        self._at, self._fmt = at, fmt

    @property
    def first(self) -> tuple[int, ...]:
        """The matrices whose products with x are gated: GATE and UP, or UP, which is both."""
        return (GATE, UP) if self._fmt.gated else (UP,)

    @property
    def lossy(self) -> bool:
        """Whether weights are unpacked from codes, in registers. wgmma takes only its left operand
        from registers; the right one must be in shared memory."""
        return self._fmt.lossy

    def sum(
        self,
        matrices: tuple[int, ...],
        across: Any,
        tile: Tile,
        add: Callable[[list[Plane], int, Any], Any],
        totals: Any,
    ) -> Any:
        """Calls add(planes, depth, totals) for each part of the summed axis and returns the totals.

        - `matrices`: `first` or (DOWN,). `planes` has the same indices of each.
        - `across`: the first of the tile's results.

        Dense and lossless records have the same parts in the same order, so the same bits.
        """
        fmt, down = self._fmt, matrices[0] == DOWN
        axis, depth = fmt.width if down else fmt.hidden, tile.depth
        if fmt.lossy:
            axis = plane_size(fmt, matrices[0])
            depth = code_depth(fmt, matrices[0], depth)

        def planes(matrix: int, at: jax.Array) -> list[Plane]:
            if fmt.lossy:
                return read_planes(self._elements, fmt, matrix, at, across, depth, tile.columns)
            place = (at, across) if down else (across, at)
            shape = (depth, tile.columns) if down else (tile.columns, depth)
            return [Plane(at, None, functools.partial(self._weights, matrix, *place, shape))]

        def step(n: jax.Array, totals: Any) -> Any:
            for part in zip(*(planes(matrix, n * depth) for matrix in matrices), strict=True):
                totals = add(list(part), depth, totals)
            return totals

        return lax.fori_loop(0, pl.cdiv(axis, depth), step, totals)

    def add_bias(self, matrix: int, across: Any, totals: jax.Array, axis: int = 1) -> jax.Array:
        """The results of a matrix with its bias, if records have biases.

        - `across`: the first of the results, which are along `axis` of totals.
        """
        fmt = self._fmt
        if not fmt.biases:
            return totals
        first, _ = fmt.parts[f"{MATRICES[matrix]}_bias"]
        number, values = (
            span(across, totals.shape[axis]),
            fmt.hidden if matrix == DOWN else fmt.width,
        )
        place = first + lax.div(number, fmt.hidden), lax.rem(number, fmt.hidden)
        bits = self._elements(*place, number < values if values % number.size else None)
        bias = lax.bitcast_convert_type(bits, jnp.dtype(fmt.dtype)).astype(jnp.float32)
        return totals + jnp.expand_dims(bias, 1 - axis)

    def _weights(self, matrix: int, row: Any, column: Any, shape: tuple[int, int]) -> jax.Array:
        """A tile of a matrix from (row, column) on, zero outside of it."""
        fmt, (rows, columns) = self._fmt, shape
        if fmt.version == "lossless12":
            return read_lossless(self._elements, fmt, matrix, row, column, shape)
        first, _ = fmt.parts[MATRICES[matrix]]
        at = self._at(pl.ds(first + row, rows), pl.ds(column, columns))
        mask = None
        if fmt.width % rows:
            mask = jnp.broadcast_to((span(row, rows) < fmt.width)[:, None], shape)
        if fmt.hidden % columns:
            inside = jnp.broadcast_to(span(column, columns) < fmt.hidden, shape)
            mask = inside if mask is None else mask & inside
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)

    def _elements(self, rows: Any, columns: Any, mask: jax.Array | None) -> jax.Array:
        at = self._at(rows, columns)
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


class Memory(NamedTuple):
    """Refs that say where experts are: the first operands of every kernel."""

    layer: Any
    """int32[1]; int32[1 + versions] if stores lack layers, with the layer's place in each store."""
    address: Any
    """int32[L, E]: arena row of an expert's record, −1 without a cell."""
    version: Any
    """int32[L, E]; None: there is one version."""
    dense: Any
    """The arena in the weights' dtype [rows, hidden]; None: no cell is dense."""
    coded: Any
    """The arena uint16[rows, hidden]; None: every cell is dense."""
    stores: tuple[Any, ...]
    """Per version [L, E, record rows, hidden], of the weights' dtype where dense, else uint16."""

    def with_record(
        self, expert: jax.Array, formats: Formats, body: Callable[[Record], None]
    ) -> None:
        """Runs the body with the expert's record in its cell or, without a cell, in the store.
        Arithmetic and bits are the same."""
        layer = self.layer[0]
        address = self.address[layer, expert]
        version = None if self.version is None else self.version[layer, expert]

        def in_cell(arena: Any) -> At:
            def at(rows: Any, columns: Any) -> Any:
                if isinstance(rows, pl.Slice):
                    return arena.at[pl.ds(address + rows.start, rows.size), columns]
                return arena.at[address + rows, columns]

            return at

        def in_store(number: int) -> At:
            place = self.layer[1 + number] if self.layer.shape[0] > 1 else layer
            return lambda rows, columns: self.stores[number].at[place, expert, rows, columns]

        def run(here: jax.Array, numbers: list[int], at: Callable[[], At], fmt: RecordFormat):
            if version is not None:
                of_these = version == numbers[0]
                for number in numbers[1:]:
                    of_these |= version == number
                here &= of_these
            pl.when(here)(lambda: body(Record(at(), fmt)))

        # Versions that differ only in the store share the code for their cells.
        for fmt in dict.fromkeys(cell for cell, _, _ in formats):
            numbers = [number for number, (cell, _, _) in enumerate(formats) if cell == fmt]
            arena = self.dense if fmt.version == "dense" else self.coded
            run(address >= 0, numbers, functools.partial(in_cell, arena), fmt)
        for number, (_, fmt, _) in enumerate(formats):
            run(address < 0, [number], functools.partial(in_store, number), fmt)
