"""The score of a cell's owner, in int32 fixed point: one formula for numpy, XLA and kernels.

A policy in the simulator (numpy) and the plan op in a step (XLA, Pallas) must agree on every
victim. So nothing here rounds: logarithms are computed from leading zeros and shifts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOG2_UNIT = 1 << 12
"""The result of log2_fixed for a factor of two."""

MAX_WEIGHT = 1024
"""Largest magnitude of a victim weight: three terms of at most 2^17 · 2^10 stay in int32."""

MAX_PRIOR = 31 * LOG2_UNIT
"""Largest magnitude of a prior: that of the other two terms."""


def log2_fixed(x: Any) -> Any:
    """log2 of x ≥ 1 times LOG2_UNIT, linear between powers of two: exact at powers of two, never
    decreasing, elsewhere too small by at most 0.087.

    - `x`: int32 numpy or jax array, any shape, or a Python int; values below 1 count as 1.
    """
    if isinstance(x, int):
        exponent = max(x, 1).bit_length() - 1
        down = exponent - 12
        return (exponent - 1) * LOG2_UNIT + (x >> down if down > 0 else max(x, 1) << -down)
    if isinstance(x, np.ndarray | np.generic):
        # The exponent and first 12 bits of a float64 are this logarithm. 5 µs instead of 76:
        # policies between layers rank cells several times a layer.
        bits = np.maximum(x, 1).astype(np.float64).view(np.int64)
        return ((bits >> 40) - (1023 << 12)).astype(np.int32)
    x = x * (x >= 1) + (x < 1)
    exponent = x * 0
    rest = x
    for shift in (16, 8, 4, 2, 1):  # floor(log2), as a leading-zero count every backend has
        big = (rest >= (1 << shift)) * 1
        exponent = exponent + big * shift
        rest = rest >> (big * shift)
    down = exponent - 12
    # The 12 bits after the leading one; shifts are kept non-negative on both sides.
    fraction = ((x - (1 << exponent)) >> (down * (down > 0))) << (-down * (down < 0))
    return exponent * LOG2_UNIT + fraction


def victim_key(age: Any, frequency: Any, prior: Any, weights: Any) -> Any:
    """The value of keeping a resident expert; the expert with the smallest is evicted.

    key = w0 · (−log2 age) + w1 · log2(1 + frequency) + w2 · prior, all int32. Equal keys are
    ordered by last use, then by expert id, so LRU is exact although the logarithm rounds.

    - `age`: references of the layer since the expert's last use, 1 or more.
    - `frequency`: references of the expert so far.
    - `prior`: a policy's score, in units of 1/LOG2_UNIT.
    - `weights`: three integers of magnitude at most MAX_WEIGHT. (1, 0, 0) is LRU, (0, 1, 0) LFU,
      (1, 1, 0) LFRU (smallest log2 frequency − log2 age).
    """
    return (
        weights[1] * log2_fixed(frequency + 1) - weights[0] * log2_fixed(age) + weights[2] * prior
    )
