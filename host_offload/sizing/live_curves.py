"""Miss curves while requests run: distances as they come, in histograms that forget."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from host_offload.sizing.miss_curves import Recency, cold_recency, find


class LiveCurves(NamedTuple):
    """Of L layers of E experts. Never changed in place; first sights are left out, since at a cold
    start they would pull memory to whom was seen least (WiSP, Algorithm 2)."""

    recency: Recency
    gathered: np.ndarray
    """int64[L·E]: finite distances since the last `forget`."""
    histogram: np.ndarray
    """float64[L, E]: decayed."""

    @property
    def misses(self) -> np.ndarray:
        """float64[L, E + 1]: warm misses by cells."""
        return tails(self.histogram)

    def see(self, ids: np.ndarray) -> LiveCurves:
        """A step's rows, ids int[N, L, k], as one reference of every layer. O(L·E)."""
        layers, experts = self.recency.place.shape
        active = np.zeros(layers * experts, bool)
        # One dimension: numpy indexes several dimensions several times slower.
        active[(ids + np.arange(0, layers * experts, experts)[:, None]).reshape(-1)] = True
        recency, found = find(self.recency, active)
        warm = found.place[~found.is_first] if found.is_first.any() else found.place
        return LiveCurves(
            recency, self.gathered + np.bincount(warm, minlength=active.size), self.histogram
        )

    def forget(self, decay: float) -> LiveCurves:
        """H ← decay·H + what was gathered."""
        histogram = decay * self.histogram + self.gathered.reshape(self.histogram.shape)
        return LiveCurves(self.recency, np.zeros_like(self.gathered), histogram)


def cold_curves(layers: int, experts: int) -> LiveCurves:
    return LiveCurves(
        cold_recency(layers, experts),
        np.zeros(layers * experts, np.int64),
        np.zeros((layers, experts)),
    )


def tails(histogram: np.ndarray) -> np.ndarray:
    """[..., n + 1] of [..., n]: column c sums what is at c and beyond."""
    sums = np.cumsum(histogram[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([sums, np.zeros_like(sums[..., :1])], axis=-1)
