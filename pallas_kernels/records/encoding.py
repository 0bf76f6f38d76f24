"""How a version encodes the weights of a matrix: the data from which a record's parts follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

GROUPS = (128, 64, 32)
SCALED = ("codes", "scales")


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
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """Dtypes of runs that can have this version."""
    native: int | None = None
    """The version's number in native CPU ops (`Version` of kernels.h); None: only XLA computes with
    it."""
    value: Callable[[jax.Array], jax.Array] | None = None
    """float32 values of codes uint16, before their scale; None: code − zero."""
    nearest: Callable[[np.ndarray], np.ndarray] | None = None
    """The codes uint8 nearest to float32 values of at most `largest`; None: integer codes
    (host_offload.versions.quantizers)."""
    largest: float = 0.0
    """The largest value of a code, if `nearest` is given."""

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
