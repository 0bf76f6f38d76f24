"""Tiles of encoded records inside Triton-lowered kernels: reference.decode, a tile at a time.

Nothing here knows where a record is: a kernel passes `read`, which loads its elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.records.format import BLOCK, ESCAPE, MATRICES, SCALE_BYTES, RecordFormat
from pallas_kernels.records.unpack import divide, float_of, unpack

Read = Callable[[Any, Any, "jax.Array | None"], jax.Array]
"""read(rows, columns, mask): uint16 elements of a record at these arena rows and columns, int32
[n, 1] and [1, m] or [n, m] each; 0 where mask, bool[n, m], is false (None: it is true)."""

GATE, UP, DOWN = range(len(MATRICES))


class Plane(NamedTuple):
    """The weights of consecutive indices of the axis that a product sums over."""

    start: Any
    """The first index."""
    end: Any
    """Indices from here on are outside the plane; None: there are none."""
    weights: Callable[[], jax.Array]
    """Returns the weights: gate and up [columns, depth], down [depth, columns]; 0 outside matrix
    and plane. A function, so that only one plane needs registers at a time."""


def span(start: Any, size: int) -> jax.Array:
    """int32[size]: start, start + 1, …"""
    return start + jnp.arange(size, dtype=jnp.int32)


def plane_size(fmt: RecordFormat, matrix: int) -> int:
    """Elements along the summed axis; each holds the codes of P weights."""
    axis = fmt.width if matrix == DOWN else fmt.hidden
    return pl.cdiv(axis, fmt.planes_of(MATRICES[matrix]))


def read_planes(
    read: Read, fmt: RecordFormat, matrix: int, start: Any, across: Any, depth: int, columns: int
) -> list[Plane]:
    """The P planes of one tile of codes with scales.

    - `start`: where the tile begins on the summed axis, a multiple of depth below plane_size.
    - `across`: the first result.
    """
    down, size = matrix == DOWN, plane_size(fmt, matrix)
    axis, results = (fmt.width, fmt.hidden) if down else (fmt.hidden, fmt.width)
    name = MATRICES[matrix]
    encoding, group, count = fmt.encodings[name], fmt.group_of(name), fmt.planes_of(name)
    shape = (depth, columns) if down else (columns, depth)
    summed, result = _along(start, depth, down), _along(across, columns, not down)
    given = result < results if results % columns else None
    # If depth divides the planes, no index is masked, and a tile has one scale for each result.
    even = size % depth == 0 and size * count == axis
    codes = read(
        *_code_place(fmt, f"{name}_codes", matrix, count, summed, result),
        _mask(shape, given, summed < size if size % depth else None),
    )

    def weights(j: int) -> jax.Array:
        if even and depth <= group:
            # One-dimensional: as [1, n] or [n, 1] a thread would load each of its scales for every
            # weight that it holds along the other axis.
            index, each = start + j * size, span(across, columns)
            mask = each < results if results % columns else None
        else:
            index, each = summed + j * size, result
            inside = None if even else (summed < size) & (index < axis)
            mask = _mask(shape, given, inside)
        found = {}
        for field in ("scales", "zeros"):
            if field in encoding.fields:
                number = _numbers(read, fmt, matrix, field, index, each, mask)
                if even and depth <= group:
                    number = number[None, :] if down else number[:, None]
                found[field] = number
        # A scale of 0 makes weights outside the matrix 0.
        return unpack(codes, found["scales"], found.get("zeros"), encoding, fmt.dtype, j)

    return [
        Plane(
            start + j * size,
            None if even else min((j + 1) * size, axis),
            functools.partial(weights, j),
        )
        for j in range(count)
    ]


def read_lossless(
    read: Read, fmt: RecordFormat, matrix: int, row: Any, column: Any, shape: tuple[int, int]
) -> jax.Array:
    """A tile of a matrix of lossless12 in bfloat16, from (row, column) on; 0 outside of it.

    row, column: multiples of the tile's sides.
    """
    rows, columns = _along(row, shape[0], True), _along(column, shape[1], False)
    mask = _mask(
        shape,
        rows < fmt.width if fmt.width % shape[0] else None,
        columns < fmt.hidden if fmt.hidden % shape[1] else None,
    )
    down = matrix == DOWN
    first, depth, axis = (row, shape[0], fmt.width) if down else (column, shape[1], fmt.hidden)
    summed, result = (rows, columns) if down else (columns, rows)

    def fields(part: str, bits: int) -> jax.Array:
        size = pl.cdiv(axis * bits, 16)
        # A tile within one plane is as contiguous as a dense one.
        plane = lax.div(summed if size % depth else jnp.asarray(first, jnp.int32), size)
        index = summed - plane * size
        name = f"{MATRICES[matrix]}_{part}"
        packed = read(*_code_place(fmt, name, matrix, 16 // bits, index, result), mask)
        return (packed >> (plane * bits).astype(jnp.uint16)) & ((1 << bits) - 1)

    real = rows < fmt.width if fmt.width % shape[0] else None
    value = _exact(read, fmt, matrix, rows, real, fields("bytes", 8), fields("codes", 4), mask)
    value = value if mask is None else jnp.where(mask, value, 0)
    return lax.bitcast_convert_type(value, jnp.bfloat16)


def _exact(read, fmt, matrix, rows, real, byte, code, mask):
    """uint16[n, m]: the bits of weights of lossless12.

    - `rows`: int32[n, 1], rows of the weights.
    - `real`: bool[n, 1], which of them exist; None: all.
    """
    table = (matrix * fmt.blocks + lax.div(rows, BLOCK)) * (1 + fmt.escapes)
    base = _flat(read, fmt, "tables", table, real)
    escaped = code == ESCAPE
    listed = _flat(
        read,
        fmt,
        "tables",
        table + 1 + byte.astype(jnp.int32),
        escaped if mask is None else escaped & mask,
    )
    value = ((byte & 0x80) << 8) | ((base - code) << 7) | (byte & 0x7F)
    return jnp.where(escaped, listed, value)


class ExactPlane(NamedTuple):
    """Weights of lossless12, to be written into a dense record."""

    row: jax.Array
    """int32[n, 1]: rows of the matrix."""
    column: Any
    """The first of m columns."""
    bits: jax.Array
    """uint16[n, m]"""
    mask: jax.Array | None
    """bool[n, m]: which weights are in the matrix; None: all."""


def read_exact_planes(
    read: Read, fmt: RecordFormat, matrix: int, row: Any, column: Any, shape: tuple[int, int]
) -> list[ExactPlane]:
    """The four planes of a tile of lossless12's codes. If 4 divides the summed axis, each element
    of the record is read once.

    - `row`, `column`: where the tile begins in the codes: [I, D/4] for gate and up, [⌈I/4⌉, D] for
      down.
    """
    down, name = matrix == DOWN, MATRICES[matrix]
    axis = fmt.width if down else fmt.hidden
    size, half = pl.cdiv(axis, 4), pl.cdiv(axis, 2)
    height, length = (size, fmt.hidden) if down else (fmt.width, size)
    rows, columns = _along(row, shape[0], True), _along(column, shape[1], False)
    real = rows < height if height % shape[0] else None
    mask = _mask(shape, real, columns < length if length % shape[1] else None)
    summed, result = (rows, columns) if down else (columns, rows)
    codes = read(*_code_place(fmt, f"{name}_codes", matrix, 4, summed, result), mask)

    def elements(index, mask):
        return read(*_code_place(fmt, f"{name}_bytes", matrix, 2, index, result), mask)

    halves = [elements(summed + j * size, mask) for j in range(2)] if half == 2 * size else None
    planes = []
    for j in range(4):
        index, inside, exists = summed + j * size, mask, real
        if size * 4 != axis:
            inside = _mask(shape, mask, index < axis)
        if down and (real is not None or size * 4 != axis):
            exists = index < axis if real is None else (index < axis) & real
        if halves is not None:
            byte = halves[j % 2] >> (8 * (j // 2))
        else:
            plane = lax.div(index, half)
            byte = elements(index - plane * half, inside) >> (plane * 8).astype(jnp.uint16)
        code = (codes >> (4 * j)) & ESCAPE
        at = (index, column) if down else (rows, column + j * size)
        bits = _exact(read, fmt, matrix, at[0], exists, byte & 0xFF, code, inside)
        planes.append(ExactPlane(*at, bits, inside))
    return planes


def _along(start: Any, size: int, rows: bool) -> jax.Array:
    """A tile's indices along one axis, as a column or a row."""
    return span(start, size)[:, None] if rows else span(start, size)[None, :]


def _mask(shape: tuple[int, int], *conditions: jax.Array | None) -> jax.Array | None:
    """bool[shape]: where all conditions hold; None: there are no conditions."""
    mask = None
    for condition in conditions:
        if condition is not None:
            mask = condition if mask is None else mask & condition
    return None if mask is None else jnp.broadcast_to(mask, shape)


def _code_place(fmt, part, matrix, planes, index, result):
    """Arena row and column, in the record, of the element at `index` of the summed axis."""
    first, _ = fmt.parts[part]
    if matrix == DOWN:
        return first + index, result
    # P weight rows fill an arena row.
    return first + lax.div(result, planes), lax.rem(result, planes) * (fmt.hidden // planes) + index


def _numbers(read, fmt, matrix, field, index, result, mask):
    """float32: the numbers of a field (scales or zeros) for the weights at `index` of the summed
    axis; 0 where mask is false."""
    part, encoding = f"{MATRICES[matrix]}_{field}", fmt.encodings[MATRICES[matrix]]
    dtype = encoding.dtype_of(field)
    group = lax.div(jnp.asarray(index, jnp.int32), fmt.group_of(MATRICES[matrix]))
    across, (_, count) = encoding.across, fmt.field_shape(MATRICES[matrix], field)
    some = result if across == 1 else lax.div(result, across)
    if dtype == "float16" and across == 1 and (matrix == DOWN or fmt.hidden % fmt.group_in == 0):
        # The same element by simpler arithmetic: its place is one that does not change along the
        # sum, plus the group.
        row, column = fmt.parts[part][0] + group, result
        if matrix != DOWN:
            row = fmt.parts[part][0] + lax.div(result, fmt.group_in)
            column = lax.rem(result, fmt.group_in) * fmt.groups_in + group
        return lax.bitcast_convert_type(read(row, column, mask), jnp.float16).astype(jnp.float32)
    number = group * count + some if matrix == DOWN else some * count + group
    size = SCALE_BYTES[dtype]
    if size == 4:
        return _wide(read, fmt, part, number, mask)
    if size == 2:
        bits = _flat(read, fmt, part, number, mask)
        return lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32)
    byte = _flat(read, fmt, part, lax.div(number, 2), mask).astype(jnp.int32)
    byte = byte >> lax.rem(number, 2) * 8 & 0xFF
    if dtype == "uint8":
        return byte.astype(jnp.float32)
    if dtype == "float8_e4m3fn":
        whole = _wide(read, fmt, f"{MATRICES[matrix]}_global", jnp.int32(0), None)
        value = float_of(byte, 8, 3)
        return value * whole if encoding.whole == "times" else divide(value, whole)
    # e8m0: a float32's exponent, whose 0 is not 0.
    bits = jnp.where(byte == 0, 1 << 22, byte << 23)
    bits = bits if mask is None else jnp.where(mask, bits, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _wide(read, fmt, part, number, mask):
    """float32: numbers of 32 bits."""
    low, high = (_flat(read, fmt, part, 2 * number + half, mask) for half in range(2))
    bits = low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _flat(read, fmt, part, element, mask):
    """The elements of a part, counted through its rows."""
    first, _ = fmt.parts[part]
    return read(first + lax.div(element, fmt.hidden), lax.rem(element, fmt.hidden), mask)
