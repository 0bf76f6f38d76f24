"""Confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moejax.errors import UserError

CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that hold the median with at least 95% confidence, whatever the values'
    distribution (binomial). Raises UserError for fewer than six."""
    n, ordered = len(values), sorted(values)
    tail, cut = 0.0, -1
    while cut + 1 < n // 2:
        tail += math.comb(n, cut + 1) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        cut += 1
    if cut < 0:
        raise UserError(f"--repeats {n}: the median of fewer than 6 has no 95% interval")
    return ordered[cut], ordered[n - 1 - cut]
