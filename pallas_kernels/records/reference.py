"""Records decoded in plain XLA: what the formats mean, bit for bit."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.records.encoding import float8_value
from pallas_kernels.records.format import BLOCK, ESCAPE, MATRICES, SCALE_BYTES, RecordFormat


def decode(record: jax.Array, fmt: RecordFormat) -> jax.Array:
    """The weights [fmt.weight_rows, D] of an expert in the run's dtype: I rows of each of
    fmt.matrices, gate, up and down^T, then those of biases.

    record: uint16[rows, D]. Raises ValueError for another shape.
    """
    if record.shape != (fmt.rows, fmt.hidden):
        raise ValueError(
            f"a record of {fmt.version} is [{fmt.rows}, {fmt.hidden}], not {list(record.shape)}"
        )
    if fmt.version == "dense":
        return _as_weights(record, fmt)
    if "tables" in fmt.encoding.fields:
        decoded = [_decode_lossless(record, fmt)]
    else:
        decoded = [_matrix(record, fmt, matrix) for matrix in fmt.matrices]
    if fmt.biases:
        first, _ = fmt.parts[f"{fmt.matrices[0]}_bias"]
        rows = sum(map(fmt.bias_rows, fmt.matrices)) * fmt.itemsize // 2
        decoded.append(_as_weights(record[first : first + rows], fmt))
    return jnp.concatenate(decoded)


def split_weights(weights: jax.Array, fmt: RecordFormat) -> tuple[list[jax.Array], list]:
    """gate, up and down^T [I, D] of a decoded expert, and their biases [I], [I] and [D], or None
    each if it has none."""
    width = fmt.width
    matrices = [weights[i * width : (i + 1) * width] for i in range(len(fmt.matrices))]
    biases: list[jax.Array | None] = [None] * len(matrices)
    first = len(matrices) * width
    for number, matrix in enumerate(fmt.matrices if fmt.biases else ()):
        last = first + fmt.bias_rows(matrix)
        values = fmt.hidden if matrix == "down" else width
        biases[number] = weights[first:last].reshape(-1)[:values]
        first = last
    if not fmt.gated:
        matrices, biases = [matrices[0], *matrices], [biases[0], *biases]
    return matrices, biases


def _matrix(record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """[I, D] of the run's dtype."""
    if "weights" not in fmt.encodings[matrix].fields:
        return _dequantize(record, fmt, matrix)
    first, rows = fmt.parts[matrix]
    return _as_weights(record[first : first + rows], fmt)


def _as_weights(rows: jax.Array, fmt: RecordFormat) -> jax.Array:
    """Arena rows of weights as [·, D] of the run's dtype."""
    shape = (-1, fmt.hidden) + (() if fmt.itemsize == 2 else (2,))
    return lax.bitcast_convert_type(rows.reshape(shape), jnp.dtype(fmt.dtype))


def _part(record: jax.Array, fmt: RecordFormat, name: str, shape: tuple[int, int]) -> jax.Array:
    first, rows = fmt.parts[name]
    return record[first : first + rows].reshape(-1)[: shape[0] * shape[1]].reshape(shape)


def _codes(record: jax.Array, fmt: RecordFormat, matrix: str, name: str, bits: int) -> jax.Array:
    """uint16[I, D]: the codes (or bytes) of a matrix, one in each element."""
    planes = 16 // bits
    down = matrix == "down"
    shape = (-(-fmt.width // planes), fmt.hidden) if down else (fmt.width, fmt.hidden // planes)
    packed = _part(record, fmt, f"{matrix}_{name}", shape)
    unpacked = [(packed >> (bits * j)) & ((1 << bits) - 1) for j in range(planes)]
    return jnp.concatenate(unpacked, axis=0 if down else 1)[: fmt.width]


class Coded(NamedTuple):
    """What a record has of each weight of a matrix, [I, D]."""

    codes: jax.Array
    """uint16."""
    scales: jax.Array
    """float32."""
    zeros: jax.Array | None
    """float32: the code that means 0; None: it is one for all."""
    mins: jax.Array | None
    """float32: what is added to the scaled code; None: nothing."""


def read_codes(record: jax.Array, fmt: RecordFormat, matrix: str) -> Coded:
    """A matrix that is held in codes with scales."""
    encoding = fmt.encodings[matrix]
    codes = _codes(record, fmt, matrix, "codes", encoding.bits)
    if encoding.high:
        codes |= _codes(record, fmt, matrix, "highs", encoding.high) << encoding.bits
    zeros = mins = None
    if "zeros" in encoding.fields:
        zeros = _of_weights(_numbers(record, fmt, matrix, "zeros"), fmt, matrix)
    if "mins" in encoding.fields:
        mins = _of_weights(_minimums(record, fmt, matrix), fmt, matrix)
    return Coded(codes, _of_weights(_scales(record, fmt, matrix), fmt, matrix), zeros, mins)


def _dequantize(record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """[I, D] of the run's dtype."""
    encoding, (codes, scales, zeros, mins) = fmt.encodings[matrix], read_codes(record, fmt, matrix)
    values = codes.astype(jnp.float32) if encoding.value is None else encoding.value(codes)
    if zeros is not None:
        values -= zeros
    elif encoding.value is None:
        values -= encoding.zero
    product = values * scales
    if mins is not None:
        product += mins
    if encoding.product is not None:
        product = product.astype(encoding.product)
    return product.astype(fmt.dtype)


def _bytes(record: jax.Array, fmt: RecordFormat, name: str) -> jax.Array:
    """uint8: the bytes of a part."""
    first, rows = fmt.parts[name]
    bits = record[first : first + rows].reshape(-1)
    return lax.bitcast_convert_type(bits, jnp.uint8).reshape(-1)


def _numbers(record: jax.Array, fmt: RecordFormat, matrix: str, field: str) -> jax.Array:
    """float32[fmt.field_shape]: the numbers of groups in a field."""
    stored, name = _bytes(record, fmt, f"{matrix}_{field}"), fmt.encodings[matrix].dtype_of(field)
    shape = fmt.field_shape(matrix, field)
    stored = stored[: math.prod(shape) * SCALE_BYTES[name]].reshape(*shape, -1)
    if name == "float8_e8m0fnu":  # XLA knows it on few devices: a float32's exponent
        exponents = stored.reshape(shape).astype(jnp.uint32)
        return lax.bitcast_convert_type(jnp.where(exponents, exponents << 23, 1 << 22), jnp.float32)
    if name == "float8_e4m3fn":
        return float8_value(stored.reshape(shape))
    return lax.bitcast_convert_type(stored, jnp.dtype(name)).reshape(shape).astype(jnp.float32)


def _scales(record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """float32[fmt.scale_shape]: the scales of a matrix."""
    encoding, scales = fmt.encodings[matrix], _numbers(record, fmt, matrix, "scales")
    if "supers" in encoding.fields:
        return scales * _of_scales(_numbers(record, fmt, matrix, "supers"), fmt, matrix)
    if encoding.whole is None:
        return scales
    one = lax.bitcast_convert_type(_bytes(record, fmt, f"{matrix}_global")[:4], jnp.float32)
    return scales * one if encoding.whole == "times" else scales / one


def _minimums(record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """float32[fmt.scale_shape]: what is added to the weights of a group."""
    mins = _numbers(record, fmt, matrix, "mins")
    if "min_supers" not in fmt.encodings[matrix].fields:
        return mins
    return -(mins * _of_scales(_numbers(record, fmt, matrix, "min_supers"), fmt, matrix))


def _of_scales(supers: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """[fmt.scale_shape]: for each scale the number above it."""
    axis = 0 if matrix == "down" else 1
    each = jnp.repeat(supers, fmt.encodings[matrix].super, axis=axis)
    return lax.slice_in_dim(each, 0, fmt.scale_shape(matrix)[axis], axis=axis)


def _of_weights(each: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """[I, D]: for each weight of a matrix the value of its group, of [fmt.scale_shape]."""
    group, across = fmt.group_of(matrix), fmt.encodings[matrix].across
    repeats = (group, across) if matrix == "down" else (across, group)
    for axis, size in enumerate((fmt.width, fmt.hidden)):
        each = lax.slice_in_dim(jnp.repeat(each, repeats[axis], axis=axis), 0, size, axis=axis)
    return each


def _decode_lossless(record: jax.Array, fmt: RecordFormat) -> jax.Array:
    tables = _part(record, fmt, "tables", (3 * fmt.blocks, 1 + fmt.escapes))
    matrices = []
    for number, matrix in enumerate(MATRICES):
        if matrix not in fmt.matrices:
            continue
        byte = _codes(record, fmt, matrix, "bytes", 8)
        code = _codes(record, fmt, matrix, "codes", 4)
        block = number * fmt.blocks + jnp.arange(fmt.width)[:, None] // BLOCK
        base = tables[block, 0]
        value = ((byte & 0x80) << 8) | ((base - code) << 7) | (byte & 0x7F)
        escaped = tables[block, 1 + jnp.minimum(byte, fmt.escapes - 1).astype(jnp.int32)]
        matrices.append(jnp.where(code == ESCAPE, escaped, value))
    return lax.bitcast_convert_type(jnp.concatenate(matrices), jnp.dtype(fmt.dtype))
