"""Records decoded in plain XLA: what the formats mean, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.records.format import BLOCK, ESCAPE, MATRICES, RecordFormat


def decode(record: jax.Array, fmt: RecordFormat) -> jax.Array:
    """The weights [3·I, D] of an expert in the run's dtype: gate rows, up rows, rows of down^T.

    record: uint16[rows, D]. Raises ValueError for another shape.
    """
    if record.shape != (fmt.rows, fmt.hidden):
        raise ValueError(
            f"a record of {fmt.version} is [{fmt.rows}, {fmt.hidden}], not {list(record.shape)}"
        )
    if "weights" in fmt.encoding.fields:
        shape = (3 * fmt.width, fmt.hidden) + (() if fmt.itemsize == 2 else (2,))
        return lax.bitcast_convert_type(record.reshape(shape), jnp.dtype(fmt.dtype))
    if "tables" in fmt.encoding.fields:
        return _decode_lossless(record, fmt)
    return jnp.concatenate([_dequantize(record, fmt, matrix) for matrix in MATRICES])


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


def _dequantize(record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """[I, D] of the run's dtype."""
    codes = _codes(record, fmt, matrix, "codes", fmt.bits)
    if matrix == "down":
        scales = _part(record, fmt, "down_scales", (fmt.groups_out, fmt.hidden))
        scales = jnp.repeat(scales, fmt.group_out, axis=0)[: fmt.width]
    else:
        scales = _part(record, fmt, f"{matrix}_scales", (fmt.width, fmt.groups_in))
        scales = jnp.repeat(scales, fmt.group_in, axis=1)[:, : fmt.hidden]
    scales = lax.bitcast_convert_type(scales, jnp.float16).astype(jnp.float32)
    value = fmt.encoding.value
    values = codes.astype(jnp.float32) - fmt.zero if value is None else value(codes)
    return (values * scales).astype(fmt.dtype)


def _decode_lossless(record: jax.Array, fmt: RecordFormat) -> jax.Array:
    tables = _part(record, fmt, "tables", (3 * fmt.blocks, 1 + fmt.escapes))
    matrices = []
    for number, matrix in enumerate(MATRICES):
        byte = _codes(record, fmt, matrix, "bytes", 8)
        code = _codes(record, fmt, matrix, "codes", 4)
        block = number * fmt.blocks + jnp.arange(fmt.width)[:, None] // BLOCK
        base = tables[block, 0]
        value = ((byte & 0x80) << 8) | ((base - code) << 7) | (byte & 0x7F)
        escaped = tables[block, 1 + jnp.minimum(byte, fmt.escapes - 1).astype(jnp.int32)]
        matrices.append(jnp.where(code == ESCAPE, escaped, value))
    return lax.bitcast_convert_type(jnp.concatenate(matrices), jnp.dtype(fmt.dtype))
