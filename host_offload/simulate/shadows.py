"""Which experts would be resident under each of several evictions, beside a running engine.

All evictions see the same references, so the experts' last use and frequency are kept once, and an
eviction is a set of residents. It makes the choices of `Pager.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.cpu.shadows import follow_shadows
from pallas_kernels.plan.victim import log2_fixed

_MOST = np.iinfo(np.int64).max
_LOG2 = log2_fixed(np.arange(1 << 13)).astype(np.int64)
"""Of small numbers: finding it takes a third of the time of computing it."""
AGES = 1 << 24
"""References after which an expert's last use no longer counts."""


class Shadows(NamedTuple):
    """Residents of L layers with E experts, under A arms with K different evictions. An arm with
    cells of two versions has two places: A counts both."""

    weights: np.ndarray
    """int64[K, 2], of pallas_kernels.plan.victim_key, without that of the prior, so much larger
    that a key has room below it for the last use and the id."""
    eviction: np.ndarray
    """int64[A], of each arm."""
    cells: np.ndarray
    """int64[A, L]"""
    resident: np.ndarray
    """bool[A, L, E]"""
    held: np.ndarray
    """int64[A, L], how many are resident."""
    last_used: np.ndarray
    """int64[L, E]"""
    frequency: np.ndarray
    """int64[L, E]"""
    clock: int = 0
    other: np.ndarray | None = None
    """int64[A]: the place of the arm's other version, or its own one. An expert that is in one of
    them is there; None: no arm has two."""

    def follow(
        self, ids: np.ndarray, filled_here: np.ndarray | None = None
    ) -> tuple[Shadows, np.ndarray]:
        """Returns the shadows after a step, and the misses int64[A] of each arm.

        - `ids`: int[N, L, k], experts that the step routes to.
        - `filled_here`: bool[A, L, E], experts that a miss brings in this version; None: all.
        """
        known = self.weights, self.eviction, self.cells
        changed = self.resident, self.held, self.last_used, self.frequency
        clock = self.clock + 1
        found = follow_shadows(ids, known, self.other, filled_here, clock, AGES, changed)
        if found is None:
            return self.follow_by_numpy(ids, filled_here)
        (resident, held, last_used, frequency), misses = found
        return Shadows(*known, resident, held, last_used, frequency, clock, self.other), misses

    def follow_by_numpy(
        self, ids: np.ndarray, filled_here: np.ndarray | None = None
    ) -> tuple[Shadows, np.ndarray]:
        """What `follow` does where there is no native library."""
        clock, resident = self.clock + 1, self.resident
        active = active_of(ids, resident.shape[2])
        missing = active > (resident if self.other is None else resident | resident[self.other])
        if filled_here is not None:
            missing &= filled_here
        filled, misses = missing, missing.sum(axis=2)
        if self.other is None and filled_here is None:
            used = active.sum(axis=1) - misses
        else:
            used = (resident & active).sum(axis=2)
        room = self.cells - used
        taken = np.minimum(misses, room)
        if (taken < misses).any():  # the others are read through
            filled = missing & (missing.cumsum(axis=2) <= room[:, :, None])
        victims = taken + self.held - self.cells
        if victims.max() > 0:
            resident = resident ^ self._first(resident > active, victims, clock)
        after = self._replace(
            resident=resident | filled,
            held=self.held + taken - np.maximum(victims, 0),
            last_used=np.where(active, clock, self.last_used),
            frequency=self.frequency + active,
            clock=clock,
        )
        return after, misses.sum(axis=1)

    def regrant(self, cells: np.ndarray) -> Shadows:
        """Returns the shadows with these cells, int[A, L] or one row for all arms. Experts beyond
        them leave in the order of eviction."""
        cells = np.ascontiguousarray(np.broadcast_to(cells, self.cells.shape), np.int64)
        gone = self._first(self.resident, self.held - cells, self.clock + 1)
        held = np.minimum(self.held, cells)
        return self._replace(cells=cells, resident=self.resident ^ gone, held=held)

    def differ(self, arm: int) -> np.ndarray:
        """Returns int64[A], the experts that each arm holds and this one does not."""
        held = self.resident[arm]
        if self.other is not None:
            held = held | self.resident[self.other[arm]]
        return (self.resident > held).sum(axis=(1, 2))

    def distances(self, ids: np.ndarray) -> np.ndarray:
        """Returns int64[L, E], how many of the experts that a step's ids int[N, L, k] name were
        last used before so many others of their layer: LRU with more cells has them. First uses do
        not count."""
        layers, experts = self.last_used.shape
        active = active_of(ids, experts)
        order = np.argsort(-self.last_used, axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(experts)[None], axis=1)
        layer, expert = np.nonzero(active & (self.last_used > 0))
        found = np.bincount(layer * experts + rank[layer, expert], minlength=layers * experts)
        return found.reshape(layers, experts)

    def _first(self, chosen: np.ndarray, count: np.ndarray, clock: int) -> np.ndarray:
        """Returns bool[A, L, E], the first `count` [A, L] of the chosen experts in the order of
        eviction: by the victim's key, its last use and its id. One number has all three, since a
        sort of numbers takes half the time of one of indices."""
        age, experts = clock - self.last_used, self.last_used.shape[1]
        bits, (recent, often) = experts.bit_length(), self.weights.T[..., None, None]
        log2, used = _LOG2.take, self.last_used
        if clock >= len(_LOG2):
            log2, used = log2_fixed, np.maximum(AGES - age, 0)
        key = often * log2(self.frequency + 1) - recent * log2(age)
        key += (used << bits) + np.arange(experts)
        order = np.where(chosen, key[self.eviction], _MOST).reshape(-1, experts)
        last = np.maximum(count, 0).ravel()
        most = np.sort(order, axis=1)[np.arange(len(last)), last - 1]
        most = np.where(last > 0, most, ~_MOST)
        return (order <= most[:, None]).reshape(chosen.shape)


def active_of(ids: np.ndarray, experts: int) -> np.ndarray:
    """Returns bool[L, E], the experts that a step's ids int[N, L, k] name."""
    active = np.zeros((ids.shape[1], experts), bool)
    active[np.arange(ids.shape[1])[:, None], ids] = True
    return active


def cold_shadows(
    weights: Sequence[tuple[int, int, int]], cells: ArrayLike, experts: int
) -> Shadows:
    """Returns shadows without residents.

    - `weights`: victim weights of each arm.
    - `cells`: of each layer, or int[A, L].
    """
    different, cells = sorted({*weights}), np.array(cells, np.int64)
    large = np.ascontiguousarray(np.array(different, np.int64)[:, :2]) << 25 + experts.bit_length()
    arms, layers = len(weights), cells.shape[-1]
    return Shadows(
        large,
        np.array([different.index(each) for each in weights]),
        np.ascontiguousarray(np.broadcast_to(cells, (arms, layers))),
        np.zeros((arms, layers, experts), bool),
        np.zeros((arms, layers), np.int64),
        np.zeros((layers, experts), np.int64),
        np.zeros((layers, experts), np.int64),
    )
