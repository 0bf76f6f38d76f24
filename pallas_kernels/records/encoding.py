"""How a version encodes the weights of a matrix: the data from which a record's parts follow."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUPS = (128, 64, 32)
SCALED = ("codes", "scales")
WHOLE = 0
"""A group or block of this many weights is the whole axis."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How weights are encoded. pallas_kernels.records.format has the layout of each field."""

    fields: tuple[str, ...] = ("weights",)
    """The fields of a record, in order: the first field of gate, up and down, then the second field
    of each. There is one "tables" for all three."""
    bits: int = 0
    """Bits of a code; 0: there are no codes, weights are stored unchanged."""
    zero: float = 0.0
    """The code that means 0 (not always an integer), if codes are integers with scales."""
    groups: tuple[int, ...] = ()
    """Sizes of a group of weights along the summed axis that share a scale. The first size that
    divides the axis is taken, otherwise the last one, with a short last group."""
    across: int = 1
    """Weights along the other axis that share it."""
    high: int = 0
    """With the field `highs`, further bits of a code, above the `bits` of the field `codes`."""
    scale: str = "float16"
    """What scales are, and the minimums of the field `mins`: "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e8m0fnu", powers of two, or "uint8" and "int8" below supers."""
    super: int = 0
    """With the field `supers`, float16 numbers: how many groups share one by which their scales
    are multiplied, and with the field `min_supers` another one for their minimums."""
    whole: str | None = None
    """With the field `global`, a float32 for the whole matrix: "times", a scale is multiplied by
    it; "over", it is divided by it."""
    product: str | None = None
    """What code times scale is rounded to before the run's dtype; None: nothing."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """Dtypes of runs that can have this version."""
    native: int | None = None
    """What native CPU ops take the codes for (`Codes` of kernels.h); None: they cannot read
    them."""
    kernels: bool = False
    """Whether Pallas kernels read records of it."""
    value: Callable[[jax.Array], jax.Array] | None = None
    """float32 values of codes uint16, before their scale; None: code − zero."""
    mantissa: int | None = None
    """Bits of the mantissa of codes that are floats of IEEE's form: sign, exponent, mantissa."""
    nearest: Callable[[np.ndarray], np.ndarray] | None = None
    """The codes uint8 nearest to float32 values of at most `largest`; None: integer codes
    (host_offload.versions.quantizers)."""
    largest: float = 0.0
    """The largest value of a code, if `nearest` is given."""

    @property
    def lossy(self) -> bool:
        """Whether decoded weights may differ from the encoded ones."""
        return "scales" in self.fields

    @functools.cached_property
    def values(self) -> np.ndarray:
        """float32[2^(bits + high)]: what each code means before it is scaled."""
        codes = np.arange(1 << self.bits + self.high, dtype=np.uint16)
        if self.value is None:
            return codes.astype(np.float32) - np.float32(self.zero)
        with jax.ensure_compile_time_eval():
            return np.asarray(self.value(jnp.asarray(codes)))

    @functools.cached_property
    def integers(self) -> tuple[np.ndarray, float] | None:
        """int32[2^(bits + high)]: what each code means as an integer below 256, and the factor that
        makes it `values`; None: codes are no integers (float8), or there are none."""
        for factor in (1.0, 0.5) if self.lossy else ():
            found = self.values / np.float32(factor)
            if (found == np.rint(found)).all() and np.abs(found).max() < 256:
                return found.astype(np.int32), factor
        return None

    def dtype_of(self, field: str) -> str:
        """What the numbers of groups in a field are."""
        return {"zeros": "uint8", "supers": "float16", "min_supers": "float16"}.get(
            field, self.scale
        )


DENSE = Encoding(native=0, kernels=True)
LOSSLESS12 = Encoding(("bytes", "codes", "tables"), 4, dtypes=("bfloat16",), native=4, kernels=True)
INT8 = Encoding(SCALED, 8, 128.0, GROUPS, native=1, kernels=True)
INT4 = Encoding(SCALED, 4, 8.0, GROUPS, native=2, kernels=True)
INT2 = Encoding(SCALED, 2, 1.5, GROUPS, native=3, kernels=True)

ZEROS = {encoding.bits: encoding.zero for encoding in (INT8, INT4, INT2)}
"""Bits of an integer code → the code that means 0."""


def float8_value(codes: jax.Array) -> jax.Array:
    """float32 of e4m3's codes; two of them are NaN."""
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)


def float4_value(codes: jax.Array) -> jax.Array:
    """float32 of e2m1's codes: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    bits = codes.astype(jnp.int32)
    exponent, sign = (bits >> 1) & 3, jnp.where(bits & 8, -0.25, 0.25)
    fraction = (bits & 1) + jnp.where(exponent > 0, 2, 0)
    return (fraction << jnp.maximum(exponent, 1)).astype(jnp.float32) * sign


def iq4_value(codes: jax.Array) -> jax.Array:
    """float32 of IQ4_NL's codes, levels that llama.cpp chose."""
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return jnp.asarray(levels, jnp.float32)[codes.astype(jnp.int32)]


GGUF = {
    "q8_0": Encoding(SCALED, 8, zero=128.0, groups=(32,), largest=128.0, native=1, kernels=True),
    "q4_0": Encoding(SCALED, 4, zero=8.0, groups=(32,), largest=8.0, native=2, kernels=True),
    "iq4_nl": Encoding(SCALED, 4, value=iq4_value, groups=(32,), largest=127.0, native=7),
    "q4_1": Encoding((*SCALED, "mins"), 4, groups=(32,), largest=15.0, native=10),
    "q5_0": Encoding(("codes", "highs", "scales"), 4, 16.0, (32,), high=1, largest=16.0, native=12),
    "q5_1": Encoding(
        ("codes", "highs", "scales", "mins"), 4, groups=(32,), high=1, largest=31.0, native=11
    ),
    "q4_k": Encoding(
        ("codes", "scales", "supers", "mins", "min_supers"),
        4,
        groups=(32,),
        scale="uint8",
        super=8,
        largest=15.0,
        native=10,
    ),
    "q5_k": Encoding(
        ("codes", "highs", "scales", "supers", "mins", "min_supers"),
        4,
        high=1,
        groups=(32,),
        scale="uint8",
        super=8,
        largest=31.0,
        native=11,
    ),
    "q6_k": Encoding(
        ("codes", "highs", "scales", "supers"),
        4,
        high=2,
        zero=32.0,
        groups=(16,),
        scale="int8",
        super=16,
        largest=32.0,
        native=13,
    ),
}
"""Formats of GGUF files, by ggml's names of them."""

_ZEROS = ("codes", "scales", "zeros")
_GLOBAL = ("codes", "scales", "global")

_CODES = {
    "fp8": Encoding(bits=8, value=float8_value, mantissa=3, largest=448.0, native=5, kernels=True),
    "fp4": Encoding(bits=4, value=float4_value, mantissa=1, largest=6.0, native=6, kernels=True),
    "int8": Encoding(bits=8, zero=128.0, largest=128.0, native=1, kernels=True),
    "int4": Encoding(bits=4, zero=8.0, largest=8.0, native=2, kernels=True),
}
_SCALES: dict[str, dict[str, Any]] = {
    "f32": {"scale": "float32"},
    "bf16": {"scale": "bfloat16", "product": "bfloat16"},
    "f16": {"scale": "float16", "product": "float16"},
    "e8m0": {"scale": "float8_e8m0fnu"},
    "e4m3xf32": {
        "scale": "float8_e4m3fn",
        "fields": _GLOBAL,
        "whole": "times",
    },
    "e4m3divf32": {
        "scale": "float8_e4m3fn",
        "fields": _GLOBAL,
        "whole": "over",
        "product": "bfloat16",
    },
}
_NAME = re.compile(
    rf"({'|'.join(_CODES)})-(?:channel|([1-9]\d*)(?:x([1-9]\d*))?)-({'|'.join(_SCALES)})(-zero)?"
)


@functools.cache
def read_name(name: str) -> Encoding | None:
    """The format of weights that others quantized, by its name: the codes, how many weights along
    the reduced axis share a scale ("channel": all) and how many along the other one, what the scale
    is, and "zero" where as many weights share the code that means 0; as in `fp8-128x128-f32`,
    `fp4-32-e8m0`, `fp4-16-e4m3xf32`, `int8-channel-f16`, `int4-128-f16-zero`. A product is rounded
    to what those who wrote the weights round it to. Formats of GGUF have ggml's names,
    such as `q8_0`. None: no such name."""
    if name in GGUF:
        return GGUF[name]
    if (found := _NAME.fullmatch(name)) is None:
        return None
    code, group, across, scale, zero = found.groups()
    if zero and (_CODES[code].value is not None or "fields" in _SCALES[scale]):
        return None
    made = {"fields": SCALED, "groups": (int(group or WHOLE),), "across": int(across or 1)}
    encoding = dataclasses.replace(_CODES[code], **(made | _SCALES[scale]))
    if not zero:
        return encoding
    most = float((1 << encoding.bits) - 1)
    native = 8 if encoding.bits == 8 else 9
    return dataclasses.replace(encoding, fields=_ZEROS, zero=0.0, largest=most, native=native)
