"""How good a prediction of a layer's experts is (PreScope, sections 6.2 and 6.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Quality(NamedTuple):
    """Shares, 0…1, of predictions of one layer. Those of hot experts and tokens are of steps, each
    counted once; a step has rows."""

    recall: float
    """Plain top-k recall: of what rows chose, who is among their k best scores."""
    hot: float
    """Windowed top-4: how many of the 4 experts with most predicted rows are among the 6 with most
    rows."""
    all_hot: float
    """In how many steps all 4 of them are."""
    tokens: float
    """Token coverage: which share of the rows of experts was predicted, at each expert at most as
    many as it got."""


def quality(
    scores: np.ndarray, later: np.ndarray, step: np.ndarray, *, hot: int = 4, window: int = 2
) -> Quality:
    """The quality of scores float[N, E] of rows that chose later int[N, k], in steps int[N].

    A row is predicted to choose its k best scores; rows are then counted by expert and step. An
    expert is among the window's where at most hot + window − 1 others have more rows, so ties are
    in, and it has some. Where fewer than `hot` experts are predicted, they are those that count.
    """
    experts = scores.shape[1]
    k = later.shape[1]
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    right = (best[:, :, None] == later[:, None, :]).any(axis=1)
    shares, complete, covered = [], [], []
    for place in np.unique(step):
        some = step == place
        predicted = np.bincount(best[some].ravel(), minlength=experts)
        real = np.bincount(later[some].ravel(), minlength=experts)
        first = np.argsort(-predicted, kind="stable")[:hot]
        first = first[predicted[first] > 0]
        least = np.sort(real)[::-1][min(hot + window, experts) - 1]
        within = (real[first] >= least) & (real[first] > 0)
        shares.append(within.mean())
        complete.append(within.all())
        covered.append(np.minimum(predicted, real).sum() / real.sum())
    return Quality(*(float(np.mean(each)) for each in (right, shares, complete, covered)))
