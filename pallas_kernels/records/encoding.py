"""How a version holds the weights of a matrix, as data from which a record's parts follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

GROUPS = (128, 64, 32)
SCALED = ("codes", "scales")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The layout of each field is in pallas_kernels.records.format."""

    fields: tuple[str, ...] = ("weights",)
    """What a record has of each matrix, one after the other: all gate, up and down of the first,
    then of the second. "tables" are there once, of all."""
    bits: int = 0
    """Of a code; 0: none, weights are there as they are."""
    zero: float = 0.0
    """The code, not always a whole one, that means 0, where codes are integers with scales."""
    groups: tuple[int, ...] = ()
    """Weights along the reduced axis that share a scale: the first of these that divides it, else
    the last, with a short last group."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """Of runs that can have it."""
    native: int | None = None
    """Its number in native CPU ops (`Version` of kernels.h); None: neither they nor kernels read
    it, and XLA computes with it."""
    value: Callable[[jax.Array], jax.Array] | None = None
    """float32 of codes uint16, to be multiplied with their scale; None: code − zero."""
    nearest: Callable[[np.ndarray], np.ndarray] | None = None
    """The codes uint8 whose values are nearest to float32, which are at most `largest`; None: of
    integers (host_offload.versions.quantizers)."""
    largest: float = 0.0
    """The largest value of a code, where `nearest` is given."""

    @property
    def lossy(self) -> bool:
        """Whether decoded weights may differ from the encoded ones."""
        return "scales" in self.fields


DENSE = Encoding(native=0)
LOSSLESS12 = Encoding(("bytes", "codes", "tables"), 4, dtypes=("bfloat16",), native=4)
INT8 = Encoding(SCALED, 8, 128.0, GROUPS, native=1)
INT4 = Encoding(SCALED, 4, 8.0, GROUPS, native=2)
INT2 = Encoding(SCALED, 2, 1.5, GROUPS, native=3)

ZEROS = {encoding.bits: encoding.zero for encoding in (INT8, INT4, INT2)}
"""Bits of an integer code → the code that means 0."""
