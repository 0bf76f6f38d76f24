"""Equations (5) and (6) of WiSP as printed, which the controllers do not need
(docs/miss_curves.md)."""

from __future__ import annotations

import numpy as np

from host_offload.sizing.cell_allocation import lower_hulls
from host_offload.sizing.split import Division, MissCosts


def marginals(
    division: Division, expert_misses: np.ndarray, kv_misses: np.ndarray, costs: MissCosts
) -> tuple[np.ndarray, np.ndarray]:
    """(float64[E + 1], float64[E + 1]): both sides of equation (5) at every cap, seconds saved per
    byte: c_E·[M_E(C) − M_E(C+1)]/b_e and c_K·[M_K(N) − M_K(N+1)]/b_k, as finite differences."""
    experts = np.asarray(expert_misses, np.float64)
    expert = costs.expert_s * -np.diff(experts, append=experts[-1:]) / division.cap_bytes
    pages = np.clip(division.pages, 0, len(kv_misses) - 1)
    kv = np.asarray(kv_misses, np.float64)
    more = kv[np.minimum(pages + 1, len(kv) - 1)]
    return expert, costs.page_s * (kv[pages] - more) / division.page_bytes


def equimarginal_cap(
    division: Division, expert_misses: np.ndarray, kv_misses: np.ndarray, costs: MissCosts
) -> int:
    """The cap up to which experts gain more per byte than KV does (equation 5), clamped to legal
    caps. Slopes are those of the lower convex hulls, since a difference in a gap of bimodal
    distances is zero and says nothing; where both curves are convex it is the argmin of J."""
    experts = _convex(np.asarray(expert_misses, np.float64))
    kv = _convex(np.asarray(kv_misses, np.float64))
    sides = marginals(division, experts, kv, costs)
    # What KV loses to the next cap is its slope there.
    lost = np.append(sides[1][1:], np.inf)
    cap = int(np.argmax(sides[0] <= lost))
    legal = np.flatnonzero(division.legal)
    return int(np.clip(cap, legal[0], legal[-1]))


def _convex(curve: np.ndarray) -> np.ndarray:
    corners = lower_hulls(curve[None], np.zeros(1, np.int64))
    return np.interp(np.arange(len(curve)), corners, curve[corners])


def admission_floor(concurrent: int, context_tokens: int, page_tokens: int) -> int:
    """N_floor of equation (6), in pages: `concurrent` sessions of so many tokens."""
    return concurrent * -(-context_tokens // page_tokens)
