"""Finds the fewest cells that hold a user's working set."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.sizing.coactivation_counts import coactivation_counts, predicted_use
from host_offload.sizing.miss_curves import MissCurves, trace_curves
from host_offload.traces.reader import Trace

EPSILON = 0.01
"""The warm miss rate that counts as none. It is ours; the paper gives no number."""


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """The cells of each layer that are enough for one user, served alone, or for all users."""

    user: int | None
    """Number of the session in the trace; None: all users together."""
    tokens: int
    by_reuse: tuple[int, ...]
    """Cells that LRU needs, by the tokens' own reuse distances (right_size)."""
    by_coactivation: tuple[int, ...] | None
    """Cells by the predictor of WiSP's Appendix C, from the counts of the same tokens
    (right_size_of_use). None for a model with one MoE layer, since it has no earlier layer to
    predict from."""


def working_sets(trace: Trace, epsilon: float = EPSILON, most: int = 32) -> list[WorkingSet]:
    """Returns the working set of all users of a trace together, then those of the `most` users
    (sessions) with the most tokens, by their numbers. Raises TraceError like trace_curves."""
    users, ids = trace.array("token.user"), trace.array("token.ids")
    known, tokens = np.unique(users[users >= 0], return_counts=True)
    chosen = np.sort(known[np.argsort(-tokens, kind="stable")[:most]]).tolist()
    found = []
    for user in (None, *chosen):
        mine = ids if user is None else ids[users == user]
        predicted = None
        if ids.shape[1] > 1:
            use = predicted_use(coactivation_counts(mine, trace.header.experts), trace.header.top_k)
            predicted = tuple(right_size_of_use(use, epsilon).tolist())
        own = tuple(right_size(trace_curves(trace, user=user), epsilon).tolist())
        found.append(WorkingSet(user, len(mine), own, predicted))
    return found


def right_size(curves: MissCurves, epsilon: float = EPSILON) -> np.ndarray:
    """Returns the fewest cells of each layer with a warm miss rate of at most `epsilon`, int64[L],
    by the user's own reuse distances (curves of trace_curves(…, user=…)), or by those of all users.
    """
    warm = curves.warm
    allowed = epsilon * (curves.references - curves.first)
    return (warm > allowed[:, None]).sum(axis=1)


def right_size_of_use(use: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Returns the fewest cells of each layer whose experts, the most used ones, have all of the
    predicted use but `epsilon`: int64[L], the support of a converged working set. A cache that must
    find these experts itself (LRU) needs at least as many."""
    shares = np.cumsum(-np.sort(-use, axis=1), axis=1)
    return (shares < 1 - epsilon - 1e-12).sum(axis=1) + 1
