"""Packs codes of 8, 4, 2 or 1 bits into the uint16 elements of a record, in numpy.

pallas_kernels.records.format defines the layout: the axis that a matrix is reduced over is cut into
equal parts, the planes, and an element holds one code of each plane.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.records.format import RecordFormat

_TILE = 1 << 16
"""Elements packed at once, so that their planes stay in the processor's cache."""


def part(record: np.ndarray, fmt: RecordFormat, name: str) -> np.ndarray:
    """The named part of a record uint16[rows, D] as flat uint16, without a copy."""
    first, rows = fmt.parts[name]
    return record[first : first + rows].reshape(-1)


def pack(codes: np.ndarray, bits: int, down: bool, into: np.ndarray) -> None:
    """Packs codes into a part of a record, and fills the rest of the part with zeros.

    - `codes`: uint8[I, D].
    - `bits`: bits of a code.
    - `down`: planes are parts of I, all equal except the last, which may be shorter; else they are
      equal parts of D.
    - `into`: the part, as `part` returns it.
    """
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
