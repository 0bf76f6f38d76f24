"""A pager for eviction policies that are only weights: as host_offload.memory.pager, exactly, but
faster.

Without transfers, versions and priors it does not matter in which cell an expert is. So a layer is
a row of experts, and all layers take one step in a few operations of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from host_offload.memory.pager import Referenced
from pallas_kernels.plan.victim import log2_fixed, victim_key

_NEVER = np.iinfo(np.int64).max


class WeightedPager:
    """All layers begin cold. cells int[L]; weights: of pallas_kernels.plan.victim_key, the last is
    not used. references: as many as there will be at most.

    Raises ValueError where so many references do not fit the 63 bits of a sort key.
    """

    def __init__(self, cells: np.ndarray, experts: int, weights: Sequence[int], references: int):
        # The keys of the least and the largest frequency at the least and the largest age.
        age = np.array([1, references + 1, 1, references + 1], np.int32)
        frequency = np.array([0, 0, references, references], np.int32)
        extremes = victim_key(age, frequency, np.int32(0), [int(w) for w in weights])
        largest = max(abs(int(key)) for key in extremes)
        if (largest + 1) * (references + 1) * experts >= _NEVER:
            raise ValueError(f"{references} references are too many for keys of 63 bits")
        layers = len(cells)
        self._cells = np.asarray(cells, np.int64)
        self._id = np.arange(experts)
        self._clock = 0
        self._weights = tuple(int(w) for w in weights)
        # Order by last use, then id: a number that is both. LRU needs no other.
        self._use = np.zeros((layers, experts), np.int64)
        self._recency_only = self._weights[1] == 0 and self._weights[0] > 0
        self._shift = int(references + 1) * experts
        self._frequency = np.zeros((layers, experts), np.int32)
        self._log2 = log2_fixed(np.arange(references + 2, dtype=np.int32)).astype(np.int64)
        self._resident = np.zeros((layers, experts), bool)
        self._count = np.zeros(layers, np.int64)

    def reference(self, active: np.ndarray) -> Referenced:
        """One reference of all layers to their sets of active experts, bool[L, E]."""
        count, resident = np.count_nonzero, self._resident
        self._clock += 1
        hit = active & resident
        missing = active ^ hit
        hits, misses = count(hit, axis=1), count(missing, axis=1)
        fills, filled = misses, missing
        if misses.any():
            free = self._cells - self._count
            evicted = np.minimum(np.maximum(misses - free, 0), self._count - hits)
            if evicted.any():
                self._evict(evicted, hit)
            fills = np.minimum(misses, free + evicted)
            if (fills < misses).any():
                filled = missing & (np.cumsum(missing, axis=1) <= fills[:, None])
            resident |= filled
            self._count += fills - evicted
        used = hit | filled
        np.copyto(self._use, self._clock * len(self._id) + self._id, where=used)
        if not self._recency_only:
            self._frequency += active
        return Referenced(hits, fills, misses - fills, missing)

    def _evict(self, evicted: np.ndarray, hit: np.ndarray) -> None:
        """Makes the evicted[l] experts of each layer with the smallest keys absent, no hit."""
        rows = np.flatnonzero(evicted)
        order = self._use[rows]
        if not self._recency_only:
            # victim_key with the logarithms from a table.
            age = self._log2[self._clock - order // len(self._id)]
            frequency = self._log2[self._frequency[rows] + 1]
            order += (self._weights[1] * frequency - self._weights[0] * age) * self._shift
        order[~self._resident[rows] | hit[rows]] = _NEVER
        last = np.sort(order, axis=1)[np.arange(rows.size), evicted[rows] - 1]
        self._resident[rows] &= order > last[:, None]
