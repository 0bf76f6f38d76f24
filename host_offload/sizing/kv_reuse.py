"""Reuse of KV pages: the second stream of a budget that experts and KV share (docs/miss_curves.md).
A reference is one (session, page), once per turn (WiSP's burst)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_PAGE_BITS = 32


class PageRecency(NamedTuple):
    """Recency list of KV pages between turns; P of them. Never changed in place."""

    keys: np.ndarray = np.zeros(0, np.int64)
    """int64[P]: (session, page), the last used first; of one turn the higher page first."""
    deepest: np.ndarray = np.zeros(0, np.int64)
    """int64[P]: the deepest place that a page had since its last use. A pool of N pages still has
    it iff that is below N: pages that are released make room, but bring nothing back."""


def page_references(
    recency: PageRecency, pages: np.ndarray, limit: int | None = None
) -> tuple[PageRecency, np.ndarray]:
    """The end of a turn that held `pages` int64[R, 2]: (session, page), each once.

    Returns the list after it and the finite distances of the turn's pages int64[R'], R' ≤ R: those
    never used before are left out. Pages of a session below 0 (a request without one) take room
    during the turn and are released at its end. limit: pages deeper than that are forgotten, and
    are new when they come back: for an estimator whose pool is never larger.
    """
    turn = page_keys(pages)
    back = np.isin(recency.keys, turn)
    distances = recency.deepest[back]
    deepest = np.maximum(recency.deepest[~back], len(turn) + np.arange(np.count_nonzero(~back)))
    held = turn >= 0
    keys = np.concatenate([turn[held], recency.keys[~back]])
    deepest = np.concatenate([np.arange(len(turn))[held], deepest])
    if limit is not None:
        kept = deepest < limit
        keys, deepest = keys[kept], deepest[kept]
    return PageRecency(keys, deepest), distances


def expected_returns(recency: PageRecency, largest: int, decay: float, turns: int) -> np.ndarray:
    """float64[largest]: a histogram of distances as if every held page came back now, times
    decay^(turns − 1); deeper pages than `largest` are left out. turns: that have ended, ≥ 1.

    What to add to a histogram with that decay that began empty, since what came back during the
    first turns says nothing of what KV is worth. Ours; docs/miss_curves.md.
    """
    depths = recency.deepest[recency.deepest < largest]
    return decay ** (turns - 1) * np.bincount(depths, minlength=largest)


def page_keys(pages: np.ndarray) -> np.ndarray:
    """int64[R] of (session, page) int64[R, 2], descending; negative for a negative session."""
    session, page = np.asarray(pages, np.int64).reshape(-1, 2).T
    return np.sort((session << _PAGE_BITS) | page)[::-1]
