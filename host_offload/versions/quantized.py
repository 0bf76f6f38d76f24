"""Matrices that a checkpoint has quantized: checks, dequantizes and packs their codes and scales.

Nothing is rounded on the way into a record, so a run computes with the codes and scales of the
file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from host_offload.versions.packing import pack
from pallas_kernels.records.encoding import Encoding

_DTYPES = {
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The dtypes that scales may have."""


class QuantizedError(ValueError):
    """Codes or scales give no finite weights."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in], reduced over its second axis."""

    codes: np.ndarray
    """uint8[out, in]."""
    scales: np.ndarray
    """[⌈out/across⌉, groups], of the dtype that the encoding names."""
    encoding: Encoding
    zeros: np.ndarray | None = None
    """uint8, shaped as the scales, if the encoding has zeros."""
    whole: np.ndarray | None = None
    """float32[1], if the encoding has a number for the whole matrix."""
    mins: np.ndarray | None = None
    """Like the scales, if the encoding has minimums."""
    supers: np.ndarray | None = None
    """float16[out, ⌈groups/super⌉], if scales are multiplied by them."""
    min_supers: np.ndarray | None = None
    """The same of the minimums."""

    def rows(self, rows: slice) -> QuantizedMatrix:
        """Some rows of the matrix: neighbours or, if each row has its own scales, every n-th.
        Raises QuantizedError where rows before the first one share its scale."""
        across, scales = self.encoding.across, rows
        if across > 1:
            if rows.step or rows.start % across:
                raise QuantizedError(f"has scales of {across} rows that are of gate and of up")
            scales = slice(rows.start // across, -(-rows.stop // across))
        numbers = {field: numbers[scales] for field, numbers in self._numbers().items()}
        return dataclasses.replace(self, codes=self.codes[rows], **numbers)

    def _numbers(self) -> dict[str, np.ndarray]:
        """Field → its numbers of groups, for the fields that there are."""
        fields = ("scales", "zeros", "mins", "supers", "min_supers")
        found = {field: getattr(self, field) for field in fields}
        return {field: numbers for field, numbers in found.items() if numbers is not None}

    def check(self, dtype: np.dtype) -> None:
        """Raises QuantizedError for codes or scales that are not finite, and for scales with which
        weights may be infinite in `dtype`, the run's."""
        if self._has_small_halves(dtype):
            return
        with np.errstate(all="ignore"):
            bad, scales = ~np.isfinite(self.encoding.values), self._scales(slice(None))
            mins = np.zeros_like(scales) if self.mins is None else self._minimums(slice(None))
        if self.whole is not None and not (np.isfinite(self.whole) & (self.whole != 0)).all():
            raise QuantizedError(f"has a scale of all scales that is {self.whole[0]:g}")
        if not (np.isfinite(scales) & np.isfinite(mins)).all():
            raise QuantizedError("has scales that are NaN or infinite")
        if bad.any() and (count := np.count_nonzero(bad[self.codes])):
            raise QuantizedError(f"has {count} codes that mean NaN")
        largest = np.float64(self.encoding.largest)
        most = np.max(np.abs(scales) * largest + np.abs(mins), initial=0)
        if most > float(ml_dtypes.finfo(dtype).max):
            raise QuantizedError(
                f"has scales up to {np.abs(scales).max():g}, of which {dtype.name} cannot hold "
                "every weight; run with dtype bfloat16 or float32"
            )

    def _has_small_halves(self, dtype: np.dtype) -> bool:
        """Whether `check` finds nothing, by finite float16 numbers alone: bfloat16 and float32 hold
        all products with bytes. It takes a tenth of the time of computing them."""
        above = self.supers is not None
        pair = (self.supers, self.min_supers) if above else (self.scales, self.mins)
        numbers = [each for each in pair if each is not None]
        if self.whole is not None or float(ml_dtypes.finfo(dtype).max) < 1e38:
            return False
        if not np.isfinite(self.encoding.values).all():
            return False
        return all(
            each.dtype == np.float16 and (each.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00
            for each in numbers
        )

    def _scales(self, rows: slice | np.ndarray) -> np.ndarray:
        """float32: what codes are multiplied by, of some rows of scales."""
        scales = self.scales[rows].astype(np.float32)
        if self.supers is not None:
            scales *= self._of_scales(self.supers[rows])
        if self.whole is None:
            return scales
        return scales * self.whole if self.encoding.whole == "times" else scales / self.whole

    def _minimums(self, rows: slice | np.ndarray) -> np.ndarray:
        """float32: what is added to the weights of a group, of some rows of minimums."""
        assert self.mins is not None
        mins = self.mins[rows].astype(np.float32)
        return mins if self.min_supers is None else -(mins * self._of_scales(self.min_supers[rows]))

    def _of_scales(self, supers: np.ndarray) -> np.ndarray:
        """float32: for each scale the number above it."""
        each = np.repeat(supers.astype(np.float32), self.encoding.super, axis=1)
        return each[:, : self.scales.shape[1]]

    def dequantize(self, first: int, out: np.ndarray) -> None:
        """Fills `out`, float32[n, in], with the weights of n rows from `first` on."""
        last, width = first + len(out), self.codes.shape[1]
        rows = np.arange(first, last) // self.encoding.across
        columns = np.arange(width) // (self.encoding.groups[0] or width)
        np.take(self.encoding.values, self.codes[first:last], out=out)
        if self.zeros is not None:
            out -= self.zeros[rows].astype(np.float32)[:, columns]
        out *= self._scales(rows)[:, columns]
        if self.mins is not None:
            out += self._minimums(rows)[:, columns]
        if self.encoding.product is not None:
            out[:] = out.astype(_DTYPES[self.encoding.product])

    def put(self, matrix: str, parts: Mapping[str, np.ndarray]) -> None:
        """Packs the matrix into its parts of a record.

        - `matrix`: "gate", "up" or "down".
        - `parts`: field of the encoding → uint16[·, rows, D].
        """
        down = matrix == "down"
        for field, numbers in self._numbers().items():
            put_values(numbers.T if down else numbers, parts[field])
        if self.whole is not None:
            put_values(self.whole, parts["global"])
        codes, bits = np.ascontiguousarray(self.codes.T if down else self.codes), self.encoding.bits
        if self.encoding.high:
            pack(codes >> bits, self.encoding.high, down, parts["highs"].reshape(-1))
            codes = codes & np.uint8((1 << bits) - 1)
        pack(codes, bits, down, parts["codes"].reshape(-1))


def put_values(values: np.ndarray, part: np.ndarray) -> None:
    """Copies values of any dtype into a part of a record, and fills the rest of it with zeros.

    - `part`: uint16[·, rows, D].
    """
    values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    into = part.reshape(-1).view(np.uint8)
    into[: values.size], into[values.size :] = values, 0


def numbers_dtype(name: str) -> np.dtype:
    """numpy's dtype of numbers that Encoding.dtype_of names."""
    return _DTYPES[name]


def as_scales(values: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Converts scales to the encoding's dtype. Raises QuantizedError for a scale that this dtype
    cannot hold exactly."""
    dtype = _DTYPES[encoding.scale]
    if values.dtype == np.uint8 and dtype.itemsize == 1:
        return values.view(dtype)
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    same = found.astype(np.float32) == values.astype(np.float32)
    if not (same | np.isnan(values.astype(np.float32))).all():
        raise QuantizedError(f"has scales in {values.dtype.name} that {dtype.name} cannot hold")
    return found
