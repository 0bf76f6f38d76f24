"""Rounds weights to few bits: a float16 scale for each group of weights, and a code for each one.

A weight is (code − zero)·scale, with the codes of pallas_kernels.records.format. A quantizer
chooses the scales. Each weight then gets the nearest code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallas_kernels.records.encoding import ZEROS, Encoding

ScaleRule = Callable[[np.ndarray, int, int], np.ndarray]
"""(weights, axis, bits) → scales, float16. The weights are finite float32, one group along `axis`,
which has length 1 in the scales."""

_TILE = 1 << 16
"""Weights rounded at once, so that a tile and its temporaries stay in the processor's cache."""

_MAGIC = 12582912.0
"""1.5·2^23. Adding it to a small float32 rounds to the nearest integer, which is in the low bits of
the sum."""

_GAUSSIAN_STEP = 0.9957
"""Step of the best uniform quantizer of 4 levels, in standard deviations of a normal
distribution (Max 1960, "Quantizing for minimum distortion", table II)."""

_CLIPS = {8: (0.8, 1.0), 4: (0.5, 1.0), 2: (0.6, 1.8)}
"""Bits → the smallest and the largest factor of rtn's scale that `mse` tries."""

_CANDIDATES = 16

_LARGEST = np.float16(65504)
"""The largest finite float16."""

_LARGEST_SCALE = {8: np.float16(515.5), 4: np.float16(9352), 2: np.float16(43648)}
"""Bits → the largest scale whose outermost code is finite in float16: the scale times 127, 7 or 1.5
is below 65520, from which on float16 rounds to infinity."""


class UnquantizableError(ValueError):
    """Weights that no scale can hold: NaN, infinite, or too large for float16 scales."""


def rtn(weights: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Scales for rounding to nearest; arguments and result are those of ScaleRule.

    With 8 and 4 bits, the largest weight of a group gets the largest code. With 2 bits that would
    waste half of the four levels, so the step is the best one for normally distributed weights, and
    weights beyond the outer levels are clipped to them. Raises UnquantizableError.
    """
    if bits == 2:
        with np.errstate(over="ignore"):  # infinite scales are refused below
            squares = np.add.reduce(np.square(weights), axis, keepdims=True)
        return _half(_GAUSSIAN_STEP * np.sqrt(squares / np.float32(weights.shape[axis])))
    largest = _absmax(weights, axis)
    most = np.float32((1 << (bits - 1)) - 1)
    half = _half(largest / most)
    # Near the smallest number of float16, which is coarse there, the nearest scale may be much too
    # small.
    clips = largest >= half.astype(np.float32) * (most + np.float32(0.5))
    return np.where(clips & (largest > 0), np.nextafter(half, np.float16(np.inf)), half)


def mse(weights: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Scales with the least sum of squared errors, among those of rtn and some that clip weights
    for narrower steps. Arguments and result are those of ScaleRule. Raises UnquantizableError."""
    best = rtn(weights, axis, bits)
    least = _squared_error(weights, best, axis, bits)
    base = best.astype(np.float32)
    for factor in np.linspace(*_CLIPS[bits], _CANDIDATES, dtype=np.float32):
        # A scale beyond the largest float16 becomes the largest float16.
        scale = _half(np.minimum(base * factor, np.float32(_LARGEST)))
        error = _squared_error(weights, scale, axis, bits)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


QUANTIZERS: dict[str, ScaleRule] = {"rtn": rtn, "mse": mse}
"""Name → the quantizer, for those that need only the weights."""


def quantize(
    weights: np.ndarray, axis: int, group: int, encoding: Encoding, rule: ScaleRule = rtn
) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a matrix.

    - `weights`: [rows, columns], bfloat16, float16 or float32.
    - `axis`: the axis that the matrix is reduced over.
    - `group`: how many weights along that axis share a scale; the last group may be shorter.
    - `rule`: chooses the scales of integer codes. With other codes, the scale makes a group's
      largest weight the largest value of the encoding.

    Returns codes, uint8 in the shape of the weights, and scales, float16. Integer codes stand for
    values that are finite in the weights' dtype. Raises UnquantizableError.
    """
    bits = encoding.bits
    codes = np.empty(weights.shape, np.uint8)
    shape = list(weights.shape)
    shape[axis] = -(-shape[axis] // group)
    scales = np.empty(shape, np.float16)
    for place, at in _tiles(weights.shape, axis, group):
        tile = to_float32(weights[place])
        length = min(group, tile.shape[axis])
        if axis == 1:
            groups = tile.reshape(len(tile), -1, length)
        else:
            groups = tile.reshape(-1, length, tile.shape[1])
        if not np.isfinite(_absmax(groups, axis + 1)).all():
            raise UnquantizableError("weights are NaN or infinite")
        if encoding.nearest is None:
            scale = finite_scales(rule(groups, axis + 1, bits), bits, weights.dtype.name)
            found = nearest_codes(groups, scale, bits)
        else:
            scale = _half(_absmax(groups, axis + 1) / np.float32(encoding.largest))
            scaled = groups * _inverse(scale)
            found = encoding.nearest(np.clip(scaled, -encoding.largest, encoding.largest))
        scales[at] = scale.reshape(scales[at].shape)
        codes[place] = found.reshape(tile.shape)
    return codes, scales


def finite_scales(scales: np.ndarray, bits: int, dtype: str) -> np.ndarray:
    """Limits scales so that their outermost codes are finite in a run of this dtype, which matters
    in float16. Each finite float16 weight still has a code within half a step, except weights
    beyond the outer levels of int2."""
    return np.minimum(scales, _LARGEST_SCALE[bits]) if dtype == "float16" else scales


def nearest_codes(weights: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """The nearest integer code of each weight, uint8.

    - `weights`: finite float32.
    - `scales`: float16, broadcast to the weights.
    """
    codes = np.empty(weights.shape, np.uint8)
    np.copyto(codes, _rounded(weights, scales, bits).view(np.uint32), casting="unsafe")
    return codes


def _rounded(weights: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """_MAGIC plus the codes, as float32."""
    scaled = weights * _inverse(scales)
    if bits == 2:
        scaled += np.float32(ZEROS[2])
        np.clip(scaled, 0, 3, out=scaled)
        scaled += np.float32(_MAGIC)
    else:
        most = np.float32((1 << (bits - 1)) - 1)
        np.clip(scaled, -most, most, out=scaled)
        scaled += np.float32(_MAGIC + ZEROS[bits])
    return scaled


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scales as float32, and 0 for a scale of 0."""
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)


def to_float32(weights: np.ndarray) -> np.ndarray:
    """Copies weights to float32. bfloat16 is converted by its bits, faster than numpy does it."""
    if weights.dtype.name != "bfloat16":
        return weights.astype(np.float32)
    wide = weights.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _tiles(shape: tuple[int, ...], axis: int, group: int):
    """Yields (index of weights, index of scales) of all tiles. No tile splits a group."""
    rows, columns = shape
    if axis == 0:
        step = max(64, _TILE // group)
        for row in range(0, rows, group):
            span, at = slice(row, min(row + group, rows)), slice(row // group, row // group + 1)
            for column in range(0, columns, step):
                place = slice(column, min(column + step, columns))
                yield (span, place), (at, place)
        return
    whole = columns // group * group
    for first, last in ((0, whole), (whole, columns)):
        if first < last:
            step, at = max(1, _TILE // (last - first)), slice(first // group, -(-last // group))
            for row in range(0, rows, step):
                place = slice(row, min(row + step, rows))
                yield (place, slice(first, last)), (place, at)


def _absmax(weights: np.ndarray, axis: int) -> np.ndarray:
    """The largest magnitudes along an axis, and NaN where there is one: without the sign bit, the
    integers of floats have the order of the floats, and NaN comes last."""
    bits = weights.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return bits.max(axis, keepdims=True).view(np.float32)


def _half(scale: np.ndarray) -> np.ndarray:
    """Rounds scales to float16; only a scale of 0 becomes 0. Raises UnquantizableError for a scale
    that is too large."""
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    if not np.isfinite(half).all():
        raise UnquantizableError("weights are too large for float16 scales")
    return np.where((half == 0) & (scale > 0), np.float16(2.0**-24), half)


def _squared_error(weights: np.ndarray, scales: np.ndarray, axis: int, bits: int) -> np.ndarray:
    decoded = _rounded(weights, scales, bits)
    decoded -= np.float32(_MAGIC)
    decoded -= np.float32(ZEROS[bits])
    decoded *= scales.astype(np.float32)
    decoded -= weights
    return np.add.reduce(np.square(decoded, out=decoded), axis, keepdims=True)
