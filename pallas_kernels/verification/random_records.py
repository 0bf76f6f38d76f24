"""Records of any format with random contents, for checks on a device. Contents are random codes, so
nothing must be encoded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.records.format import SCALE_BYTES, RecordFormat
from pallas_kernels.verification.check import draw


def random_records(seed: int, count: int, fmt: RecordFormat) -> jax.Array:
    """uint16[1, count, rows, D]: records whose weights give products of about 1."""
    parts = [
        _part(seed + number, count, fmt, name, rows)
        for number, (name, (_, rows)) in enumerate(fmt.parts.items())
    ]
    records = jnp.concatenate(parts, axis=1)
    padding = fmt.rows - records.shape[1]
    return jnp.pad(records, ((0, 0), (0, padding), (0, 0)))[None]


def _part(seed: int, count: int, fmt: RecordFormat, name: str, rows: int) -> jax.Array:
    """uint16[count, rows, D]"""
    shape = count, rows, fmt.hidden
    matrix, _, kind = name.partition("_")
    size = (fmt.width if matrix == "down" else fmt.hidden) ** -0.5  # gate and up sum over D
    if kind in ("", "bias"):
        values, size = (count, rows * 2 // fmt.itemsize, fmt.hidden), size if kind == "" else 1.0
        weights = jax.lax.bitcast_convert_type(draw(seed, values, fmt.dtype, size), jnp.uint16)
        return weights.reshape(shape)
    encoding = fmt.encodings.get(matrix)
    if kind == "scales" and encoding is not None:
        size /= encoding.largest or 2 ** (encoding.bits - 1)
        if encoding.scale == "float8_e8m0fnu":
            exponent = 127 + round(math.log2(size))
            return jnp.full(shape, exponent << 8 | exponent, jnp.uint16)
        if encoding.scale == "float8_e4m3fn":  # about 1, below a number of the whole matrix
            bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint16)
            return bits & 0x0F0F | 0x3030
        values = -(-rows * 2 // SCALE_BYTES[encoding.scale])
        scales = draw(seed, (count, values, fmt.hidden), encoding.scale, size)
        bits = jax.lax.bitcast_convert_type(scales, jnp.uint16)
        return bits.reshape(count, -1, fmt.hidden)[:, :rows]
    if kind == "global" and encoding is not None:
        size /= encoding.largest
        bits = np.float32(size if encoding.whole == "times" else 1 / size).view(np.uint32)
        return jnp.resize(jnp.asarray([bits & 0xFFFF, bits >> 16], jnp.uint16), shape)
    if name == "tables":
        # Each block's base exponent, then the weights of its table.
        elements = rows * fmt.hidden
        listed = draw(seed, (count, elements), "bfloat16", fmt.hidden**-0.5)
        base = 128 + round(math.log2(fmt.hidden**-0.5))
        is_base = jnp.arange(elements) % (1 + fmt.escapes) == 0
        bits = jax.lax.bitcast_convert_type(listed, jnp.uint16)
        return jnp.where(is_base, jnp.uint16(base), bits).reshape(shape)
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint16)
    if encoding is not None and encoding.mantissa == 3:  # two codes are NaN
        bits &= 0xFEFE
    # The byte of an escape is an index below `escapes`, a number whose bits are all ones.
    return bits & ((fmt.escapes & 0xF7) * 0x101) if kind == "bytes" else bits
