"""The formats of records as native CPU ops read them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import Formats

_FIELDS = 52
"""Numbers of a format (`kFields` of handlers.cc)."""

_SCALES = ("float16", "bfloat16", "float32", "float8_e8m0fnu", "float8_e4m3fn", "uint8", "int8")
_PRODUCTS = (None, "bfloat16", "float16")
_WHOLE = (None, "times", "over")
"""What scales are, products are rounded to and a global float32 does, in the order of `ScaleType`,
`Rounding` and `Whole` of kernels.h."""


def versions(
    formats: Formats | None,
    stores: tuple[jax.Array, ...],
    layers: int | None = None,
    arithmetic: str = "exact",
) -> dict[str, Any]:
    """The attributes `width`, `formats` and `places` of a call (`versions_of` of handlers.cc).

    - `formats`: None: records are copied unchanged, so only their rows count.
    - `layers`: of the tables; None: of the stores.
    - `arithmetic`: of products.
    """
    if formats is None:
        numbers = np.zeros((len(stores), 2, _FIELDS), np.int64)
        numbers[:, :, 0] = [[store.shape[2]] for store in stores]
        places, width = [range(store.shape[0]) for store in stores], 0
    else:
        numbers = np.array(
            [format_numbers(fmt, arithmetic) for version in formats for fmt in version[:2]],
            np.int64,
        )
        width = formats[0].cell.width
        places = [
            version.places or range(layers or store.shape[0])
            for version, store in zip(formats, stores, strict=True)
        ]
    return {
        "width": np.int64(width),
        "formats": numbers.reshape(-1),
        "places": np.array(places, np.int64).reshape(-1),
    }


def format_numbers(fmt: RecordFormat, arithmetic: str = "exact") -> list[int]:
    """A format as `format_of` of handlers.cc reads it."""

    encodings = fmt.encodings

    def first(matrix, *names):
        if matrix in encodings and matrix not in fmt.matrices:
            matrix = "up"
        return next((fmt.parts[p][0] for n in names if (p := matrix + n) in fmt.parts), 0)

    numbers = [fmt.rows, fmt.blocks, fmt.escapes, first("tables", "")]
    for matrix, encoding in encodings.items():
        assert encoding.native is not None, "resolve_ops gives other versions no native op"
        lossless = "bytes" in encoding.fields
        numbers += [
            encoding.native,
            _SCALES.index(encoding.scale),
            _PRODUCTS.index(encoding.product),
            fmt.group_of(matrix),
            encoding.across,
            first(matrix, "_bytes" if lossless else "_codes", ""),
            first(matrix, "_codes" if lossless else "_scales"),
            first(matrix, "_highs"),
            first(matrix, "_zeros", "_mins"),
            encoding.super,
            first(matrix, "_supers"),
            first(matrix, "_min_supers"),
            _WHOLE.index(encoding.whole),
            first(matrix, "_global"),
            fmt.integer_unit(matrix) if arithmetic == "int8" else 0,
        ]
    return numbers + [first(matrix, "_bias") for matrix in encodings]
