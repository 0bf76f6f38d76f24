"""Recency lists: how many items were used since each was used last (LRU's stack distance).

A reference is to a *set* and no member of it is a victim, so an item's distance is its place in the
list as it stood before the reference. The list's order is last use, then id, as in
pallas_kernels.plan.victim.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Recency(NamedTuple):
    """Recency lists of M rows (layers) over E items each. Never changed in place."""

    place: np.ndarray
    """int64[M, E]: the place of each item in its row's list, 0 for the item used last. Among items
    used together the larger id comes first; items that were never used come last. Place d of row r
    is written as r·E + d, an index into an array [M, E]."""
    seen: np.ndarray
    """int64[M]: number of items that were ever used."""


class Distances(NamedTuple):
    """The places of the R items of one reference, ordered by row, then item."""

    place: np.ndarray
    """int64[R]: as in Recency.place, before the reference."""
    is_first: np.ndarray
    """bool[R]: whether the item was never used before."""
    sizes: np.ndarray
    """int64[M]: items of each row."""


def cold_recency(rows: int, items: int) -> Recency:
    """Returns lists in which nothing was used yet."""
    return Recency(np.arange(rows * items).reshape(rows, items), np.zeros(rows, np.int64))


def reference(recency: Recency, active: np.ndarray) -> tuple[Recency, Distances]:
    """Makes one reference of all rows to their sets bool[M, E]; an empty set leaves its row
    unchanged. O(M·E), however many items are active."""
    rows, items = recency.place.shape
    # One dimension and take: numpy indexes several dimensions several times slower.
    place, starts = recency.place.reshape(-1), np.arange(0, rows * items, items)
    member = np.flatnonzero(active)
    ends = np.searchsorted(member, starts + items)
    sizes = np.diff(ends, prepend=0)
    found = place.take(member)
    first = found >= np.repeat(starts + recency.seen, sizes)
    seen = recency.seen
    if first.any():
        seen = seen + np.bincount(np.repeat(np.arange(rows), sizes)[first], minlength=rows)
    # An item that is not used moves back by the number of used items that stood behind it: all of
    # its row but those before it. `used` counts from row 0 on, as `ends` does.
    used = np.zeros(rows * items, np.int64)
    used[found] = 1
    moved = place - np.cumsum(used).take(place)
    by_row = moved.reshape(rows, items)
    by_row += ends[:, None]
    # Used items come to the front of their row, the larger id first.
    moved[member] = np.repeat(starts + ends, sizes) - np.arange(1, len(member) + 1)
    return Recency(by_row, seen), Distances(found, first, sizes)


def tails(histogram: np.ndarray) -> np.ndarray:
    """Returns the tail sums of a histogram, [..., n + 1] of [..., n]: column c sums the entries at
    c and beyond, since a reference at distance d misses with c cells iff d >= c."""
    sums = np.cumsum(histogram[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([sums, np.zeros_like(sums[..., :1])], axis=-1)
