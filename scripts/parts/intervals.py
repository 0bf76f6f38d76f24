"""Intervals of what was measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000


def bootstrap(
    values: np.ndarray, statistic: Callable[..., np.ndarray] = np.median
) -> tuple[float, float]:
    """The 95% interval of a statistic of these values, by percentiles of resampled ones."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(statistic(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)
