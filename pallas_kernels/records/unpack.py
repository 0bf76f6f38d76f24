"""Codes to weights inside Triton-lowered kernels.

Integers with scales of 16 bits become weights two in a register, as PTX. LLVM would extract each
code by itself, by 16-bit arithmetic and two conversions. Here a byte of codes is put below an
exponent, which makes it a float32 without a conversion. One fused multiply and add subtracts
exponent and zero point and scales, exactly. One conversion rounds two weights. That is 2.5
instructions a weight, plus 1/P for masks with fewer than 8 bits.

Other codes become weights as the reference says, in plain jax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import plgpu
from pallas_kernels.records.encoding import Encoding

_MANTISSA = 23
"""Bits of a float32's, below its exponent."""

_WEIGHTS = """{{
\t.reg .b32 %low, %high;
\tprmt.b32 %low, $1, {exponent:#x}, {low:#x};
\tprmt.b32 %high, $1, {exponent:#x}, {high:#x};
\tfma.rn.f32 %low, %low, $2, $4;
\tfma.rn.f32 %high, %high, $3, $5;
\tcvt.rn.{dtype}x2.f32 $0, %high, %low;
\t}}"""

_PTX_TYPES = {"bfloat16": "bf16", "float16": "f16"}


def unpack(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    encoding: Encoding,
    dtype: str,
    plane: int,
) -> jax.Array:
    """The weights of a plane, dtype [n, m]: reference.decode's.

    - `codes`: uint16[n, m]; bits N·plane … N·plane + N − 1 are a weight's code.
    - `scales`: float32, broadcast to [n, m].
    - `zeros`: the codes that mean 0, like the scales; None: the format has one for all.
    """
    rounded = encoding.product in (None, dtype)
    exact = encoding.mantissa is None and encoding.scale in ("float16", "bfloat16")
    if zeros is None and exact and rounded and dtype in _PTX_TYPES:
        return _unpack_pairs(codes, scales, encoding, dtype, plane)
    code = (codes >> (encoding.bits * plane)).astype(jnp.int32) & ((1 << encoding.bits) - 1)
    product = _value(code, zeros, encoding) * scales
    if encoding.product is not None:
        product = product.astype(encoding.product)
    return product.astype(dtype)


def _value(code: jax.Array, zeros: jax.Array | None, encoding: Encoding) -> jax.Array:
    """float32: what codes mean before they are scaled."""
    if encoding.mantissa is None:
        return code.astype(jnp.float32) - (encoding.zero if zeros is None else zeros)
    return float_of(code, encoding.bits, encoding.mantissa)


def float_of(code: jax.Array, bits: int, mantissa: int) -> jax.Array:
    """float32 of codes int32 that are floats of IEEE's form.

    Their bits in their order are a float16 whose exponent is less by the difference of the two
    biases. A float32 would flush the smallest codes to 0 on some devices."""
    sign, exponent = bits - 1, bits - 1 - mantissa
    half = (code >> sign) << 15 | (code & (1 << sign) - 1) << 10 - mantissa
    half = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32) * jnp.float32(2.0 ** (16 - (1 << exponent - 1)))


def divide(numbers: jax.Array, by: jax.Array) -> jax.Array:
    """float32 quotients, rounded as XLA's: Triton's own division is a few units off."""
    operands = numbers, jnp.broadcast_to(by, numbers.shape)
    return _elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", numbers.dtype, *operands, pack=1)


def _unpack_pairs(
    codes: jax.Array, scales: jax.Array, encoding: Encoding, dtype: str, plane: int
) -> jax.Array:
    """(code − zero)·scale, exact in float32, rounded once. Arguments are those of unpack; scales
    have values of 16 bits."""
    bits = encoding.bits
    byte, first = divmod(bits * plane, 8)
    # Where a field of N bits from bit `first` on goes: byte 2, or where it would touch the exponent
    # byte 1. With an exponent under which its lowest bit counts as 1, that makes 2^p + code, and
    # (2^p + zero)·scale has no more than float32's 24 bits.
    to = 2 if first + bits <= 7 else 1
    p = _MANTISSA - 8 * to - first
    offsets = scales * -(2.0**p + encoding.zero)
    if bits < 8:
        codes = _elementwise(
            f"and.b32 $0, $1, {((1 << bits) - 1 << first) * 0x01010101:#x};",
            "=r,r",
            jnp.int16,
            codes,
        )
    # prmt's bytes: 0 to 3 of the codes, 4 to 7 of the exponent, whose lower ones are 0.
    places = 0x7444 & ~(0xF << 4 * to)
    asm = _WEIGHTS.format(
        exponent=(127 + p) << _MANTISSA,
        low=places | byte << 4 * to,
        high=places | byte + 2 << 4 * to,
        dtype=_PTX_TYPES[dtype],
    )
    operands = (jnp.broadcast_to(part, codes.shape) for part in (scales, offsets))
    return _elementwise(asm, "=r,r,r,r,r,r", jnp.dtype(dtype), codes, *operands)


def _elementwise(
    asm: str, constraints: str, dtype: jnp.dtype, *operands: jax.Array, pack: int = 2
) -> jax.Array:
    """Runs asm for every `pack` elements: 16-bit operands share a register, float32 operands have
    one each."""
    shape = jax.ShapeDtypeStruct(operands[0].shape, dtype)
    (result,) = plgpu.elementwise_inline_asm(
        asm, args=operands, constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return result
