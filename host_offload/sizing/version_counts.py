"""In which versions a simulated step computed and moved its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry


class VersionCounts(NamedTuple):
    """Of one step: L layers, V versions. Sums over versions are the step's own counts."""

    version: np.ndarray
    """int32[L, E]: the version that each needed expert was computed in; 0 for all others."""
    fills: np.ndarray
    """int64[L, V]: experts moved into a cell, by the version that moved."""
    read_through: np.ndarray
    """int64[L, V]"""
    staged: np.ndarray
    """int64[L, V]"""


class VersionCounter:
    """Counts one step beside a pager that carries it out."""

    def __init__(self, pager: Pager):
        self._pager = pager
        layers, experts = pager.tables.address.shape
        fills, read_through, staged = np.zeros((3, layers, pager.versions), np.int64)
        version = np.zeros((layers, experts), np.int32)
        self.counts = VersionCounts(version, fills, read_through, staged)

    def referenced(self, active: np.ndarray, missing: np.ndarray, span: slice) -> None:
        """A reference of the layers of `span` was carried out just now; active, missing:
        bool[M, E]."""
        tables, counts = self._pager.tables, self.counts
        version = tables.version[span]
        np.copyto(counts.version[span], version, where=active)
        # What found a cell has an address now.
        filled = missing & (tables.address[span] >= 0)
        for number in range(self._pager.versions):
            mine = version == number
            counts.fills[span, number] += np.count_nonzero(filled & mine, axis=1)
            through = missing & ~filled & mine
            counts.read_through[span, number] += np.count_nonzero(through, axis=1)

    def staged(self, entries: Sequence[Entry], done: np.ndarray) -> None:
        """done: int[S], 1 for each entry that was carried out."""
        for entry, carried_out in zip(entries, done.tolist(), strict=True):
            self.counts.staged[entry.layer, entry.version] += carried_out
