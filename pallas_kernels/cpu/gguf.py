"""Matrices in the blocks of GGUF files, put into records by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from pallas_kernels.cpu.library import library

KINDS = {
    "Q8_0": 0,
    "Q4_0": 1,
    "Q4_1": 2,
    "Q5_0": 3,
    "Q5_1": 4,
    "Q4_K": 5,
    "Q5_K": 6,
    "Q6_K": 7,
    "MXFP4": 8,
    "IQ4_NL": 1,
}
"""ggml type → the layout of its blocks in the library (`Kind` of gguf.cc)."""

BIASES = {"bfloat16": 9, "float32": 10}
"""Dtype of biases in a record → the kind of those in float32."""

FIELDS = ("codes", "highs", "scales", "supers", "mins", "min_supers")

BLOCK_MATRIX = np.dtype(
    [
        *((name, np.int64) for name in ("kind", "rows", "width", "bytes", "down")),
        ("places", np.int64, len(FIELDS)),
        ("sizes", np.int64, len(FIELDS)),
    ]
)
"""A matrix for the library (`BlockMatrix` of gguf.h). bytes 0: there is none.

- `places`, `sizes`: of its FIELDS in a record, in bytes; biases have the first one's.
"""


def put_blocks(
    type_: str, raw: np.ndarray, width: int, down: bool, parts: Mapping[str, np.ndarray]
) -> None:
    """Puts a matrix [rows, width] into its parts of a record, and zeros behind it.

    - `type_`: one of KINDS.
    - `raw`: uint8[rows, bytes of a row].
    - `down`: the record has it transposed.
    - `parts`: field → contiguous uint16.

    Raises ValueError where a part is too small, and as `library`.
    """
    function = library().moejax_put_blocks
    function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_void_p] * 3
    if not all(part.flags.c_contiguous for part in (raw, *parts.values())):
        raise ValueError("blocks and parts of records must be contiguous")
    held = [parts.get(field) for field in FIELDS]
    places = [0 if part is None else part.ctypes.data for part in held]
    sizes = [0 if part is None else part.nbytes for part in held]
    matrix = np.array(
        (KINDS[type_], len(raw), width, raw.nbytes, down, places, sizes), BLOCK_MATRIX
    )
    if wrong := function(matrix.ctypes.data, raw.ctypes.data, 0):
        what = f"part {FIELDS[wrong - 1]} is too small" if wrong > 0 else f"width {width}"
        raise ValueError(f"{type_}: {what}")
