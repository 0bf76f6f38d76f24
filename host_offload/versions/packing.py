"""Codes of 8, 4 or 2 bits in the uint16 of a record, in numpy.

The layout is in pallas_kernels.records.format: an element holds codes of as many planes, equal
parts of the axis that a matrix is reduced over.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.records.format import RecordFormat

_TILE = 1 << 16
"""Elements packed at once, so that their planes stay in the processor's cache."""


def part(record: np.ndarray, fmt: RecordFormat, name: str) -> np.ndarray:
    """A part of a record uint16[rows, D] as uint16[its rows · D], without a copy."""
    first, rows = fmt.parts[name]
    return record[first : first + rows].reshape(-1)


def pack(codes: np.ndarray, bits: int, down: bool, into: np.ndarray) -> None:
    """Writes codes uint8[I, D] into a part; what is left of it becomes zero. down: planes are equal
    parts of I, the last one maybe shorter, instead of D."""
    planes, (rows, columns) = 16 // bits, codes.shape
    height, width = (-(-rows // planes), columns) if down else (rows, columns // planes)
    packed = into[: height * width].reshape(height, width)
    into[height * width :] = 0
    step = max(1, _TILE // width)
    for first in range(0, height, step):
        tile = packed[first : first + step]
        plane = np.empty_like(tile)
        for j in range(planes):
            if down:
                start = first + j * height
                source = codes[start : min(start + len(tile), (j + 1) * height, rows)]
            else:
                source = codes[first : first + step, j * width : (j + 1) * width]
            if j == 0:
                tile[: len(source)] = source
                continue
            shifted = plane[: len(source)]
            np.copyto(shifted, source)
            shifted <<= bits * j
            tile[: len(source)] |= shifted
