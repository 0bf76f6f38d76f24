"""What Pallas's interpreter lacks on the CPU, so that no kernel body needs a branch for it.

Import it before an interpreted kernel is compiled.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import effects
from jax.experimental.pallas import triton as plgpu
from jax.interpreters import mlir


def _barrier(context):
    """The interpreter finishes one operation of a program before the next: nothing to wait for."""
    return []


def _primitive(function):
    """The primitive that the last equation of a jax function binds."""
    *_, equation = jax.make_jaxpr(function)().eqns
    return equation.primitive, equation.effects


_debug_barrier, _effects = _primitive(plgpu.debug_barrier)
mlir.register_lowering(_debug_barrier, _barrier, platform="cpu")
for effect in _effects:
    effects.lowerable_effects.add_type(type(effect))


def _inline_assembly(context, *operands, asm, **_):
    """The assembly of pallas_kernels/records/unpack.py, each element by itself."""
    if found := re.fullmatch(r"and\.b32 \$0, \$1, (0x[\da-f]+);", asm):
        mask = int(found[1], 16)
        assert mask >> 16 == mask & 0xFFFF

        def formula(codes):
            return [codes.astype(jnp.int16) & jnp.int16((mask ^ 0x8000) % 0x10000 - 0x8000)]

    elif asm == "div.rn.f32 $0, $1, $2;":

        def formula(numbers, by):
            return [numbers / by]

    else:
        formula = functools.partial(_weights, *_selections(asm), context.avals_out[0].dtype)
    return mlir.lower_fun(formula, multiple_results=True)(context, *operands)


def _selections(asm):
    """The exponent and the bytes of a code's place: both halves' are alike, two bytes apart."""
    low, high = (
        (int(exponent, 16), [int(digit, 16) for digit in reversed(f"{int(selection, 16):04x}")])
        for exponent, selection in re.findall(
            r"prmt\.b32 %\w+, \$1, (0x[\da-f]+), (0x[\da-f]+);", asm
        )
    )
    assert low[0] == high[0]
    assert [byte + 2 if byte < 2 else byte for byte in low[1]] == high[1]
    assert re.findall(r"fma\S+ [^;]*;", asm) == [
        "fma.rn.f32 %low, %low, $2, $4;",
        "fma.rn.f32 %high, %high, $3, $5;",
    ]
    assert re.search(r"cvt\.rn\.(bf|f)16x2\.f32 \$0, %high, %low;", asm)
    return low


def _weights(exponent, selection, dtype, codes, scales, offsets):
    """One fused multiply and add, by exact steps: an element is 2^p + code as a float32, an offset
    −(2^p + zero)·scale; 2^p·scale + offset is −zero·scale, and so on."""
    bits = jnp.full(codes.shape, 0, jnp.uint32)
    for place, byte in enumerate(selection):
        if byte < 4:
            value = (codes.astype(jnp.uint16).astype(jnp.uint32) >> (8 * byte)) & 0xFF
        else:
            value = jnp.uint32(exponent >> 8 * (byte - 4) & 0xFF)
        bits |= value << 8 * place
    base = lax.bitcast_convert_type(jnp.uint32(exponent), jnp.float32)
    code = lax.bitcast_convert_type(bits, jnp.float32) - base
    return [(code * scales + (base * scales + offsets)).astype(dtype)]


mlir.register_lowering(
    _primitive(
        lambda: plgpu.elementwise_inline_asm(
            "",
            args=[jnp.zeros(1)],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.float32)],
        )
    )[0],
    _inline_assembly,
    platform="cpu",
)
