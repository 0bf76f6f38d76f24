"""Matrices as others quantized them: codes and scales, checked, dequantized and put into records.

Nothing is rounded on the way into a record, so the codes and scales that are computed with are
those of the file.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from host_offload.versions.packing import pack
from pallas_kernels.records.encoding import Encoding
from pallas_kernels.records.format import RecordFormat

_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""What scales can be."""


class QuantizedError(ValueError):
    """Codes or scales that no weight can be made of."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in], reduced over its second axis."""

    codes: np.ndarray
    """uint8[out, in]."""
    scales: np.ndarray
    """[⌈out/across⌉, groups], of the dtype that the encoding names."""
    encoding: Encoding

    def rows(self, rows: slice) -> QuantizedMatrix:
        """Some of its rows, which begin where a scale begins."""
        across = self.encoding.across
        scales = slice(rows.start // across, -(-rows.stop // across))
        return dataclasses.replace(self, codes=self.codes[rows], scales=self.scales[scales])

    def check(self, dtype: np.dtype) -> None:
        """Raises QuantizedError for codes or scales that are not finite, and for scales of which a
        run of that dtype may get infinite weights."""
        bad, scales = ~np.isfinite(self.encoding.values), self.scales.astype(np.float32)
        if not np.isfinite(scales).all():
            raise QuantizedError("has scales that are NaN or infinite")
        if bad.any() and (count := np.count_nonzero(bad[self.codes])):
            raise QuantizedError(f"has {count} codes that mean NaN")
        most = float(np.abs(scales).max(initial=0)) * self.encoding.largest
        if most > float(ml_dtypes.finfo(dtype).max):
            raise QuantizedError(
                f"has scales up to {np.abs(scales).max():g}, of which {dtype.name} cannot hold "
                "every weight; run with dtype bfloat16 or float32"
            )

    def dequantize(self, first: int, out: np.ndarray) -> None:
        """Fills float32[n, in] with the weights of rows from `first` on."""
        last, width = first + len(out), self.codes.shape[1]
        rows = np.arange(first, last) // self.encoding.across
        columns = np.arange(width) // (self.encoding.groups[0] or width)
        np.take(self.encoding.values, self.codes[first:last], out=out)
        out *= self.scales[rows].astype(np.float32)[:, columns]
        if self.encoding.product is not None:
            out[:] = out.astype(_DTYPES[self.encoding.product])

    def put(self, fmt: RecordFormat, matrix: str, codes: np.ndarray, scales: np.ndarray) -> None:
        """Writes it into its two parts of a record. matrix: "gate", "up" or "down". codes, scales:
        uint16[rows, D], the parts."""
        down = matrix == "down"
        put_scales(self.scales.T if down else self.scales, scales)
        packed = np.ascontiguousarray(self.codes.T) if down else self.codes
        pack(packed, fmt.bits, down, codes.reshape(-1))


def put_scales(scales: np.ndarray, part: np.ndarray) -> None:
    """Writes scales of any dtype into a part uint16[rows, D]; what is left of it becomes zero."""
    values = np.ascontiguousarray(scales).reshape(-1).view(np.uint8)
    into = part.reshape(-1).view(np.uint8)
    into[: values.size], into[values.size :] = values, 0


def as_scales(values: np.ndarray, encoding: Encoding) -> np.ndarray:
    """The scales in the dtype that the encoding names, exactly. Raises QuantizedError where one has
    no equal there."""
    dtype = _DTYPES[encoding.scale]
    if values.dtype == np.uint8 and dtype.itemsize == 1:
        return values.view(dtype)
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    same = found.astype(np.float32) == values.astype(np.float32)
    if not (same | np.isnan(values.astype(np.float32))).all():
        raise QuantizedError(f"has scales in {values.dtype.name} that {dtype.name} cannot hold")
    return found
