"""Miss curves: how many misses LRU has at every number of cells, from one pass over the references;
and the reuse of KV pages, the second stream of a budget that experts and KV share.

WiSP, equation (3): a reference hits with c cells iff its distance (traces.recency) is below c. Each
wave of a prefill step is a reference of its own. A reference of KV is one (session, page), once per
turn (WiSP's burst). docs/explanation/miss_curves.md explains the curves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from host_offload.traces.reader import Trace
from host_offload.traces.recency import Recency, cold_recency, reference, tails
from host_offload.traces.schema import TraceError
from host_offload.traces.step_sets import in_waves, read_step_sets


class LiveCurves(NamedTuple):
    """Miss curves of L layers of E experts while requests run: distances as they come, in decaying
    histograms. Never changed in place. First uses are left out, since at a cold start they would
    move memory to the layers that were used least (WiSP, Algorithm 2)."""

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
        """Adds a step's rows, ids int[N, L, k], as one reference of every layer. O(L·E)."""
        layers, experts = self.recency.place.shape
        active = np.zeros(layers * experts, bool)
        active[(ids + np.arange(0, layers * experts, experts)[:, None]).reshape(-1)] = True
        return self.reference(active)

    def reference(self, active: np.ndarray) -> LiveCurves:
        """Adds one reference to sets bool[L, E]."""
        recency, found = reference(self.recency, active)
        warm = found.place[~found.is_first] if found.is_first.any() else found.place
        gathered = self.gathered + np.bincount(warm, minlength=len(self.gathered))
        return LiveCurves(recency, gathered, self.histogram)

    def forget(self, decay: float) -> LiveCurves:
        """Decays the histogram and adds the gathered distances: H ← decay·H + gathered."""
        histogram = decay * self.histogram + self.gathered.reshape(self.histogram.shape)
        return LiveCurves(self.recency, np.zeros_like(self.gathered), histogram)


def cold_curves(layers: int, experts: int) -> LiveCurves:
    recency = cold_recency(layers, experts)
    return LiveCurves(recency, np.zeros(layers * experts, np.int64), np.zeros((layers, experts)))


@dataclasses.dataclass(frozen=True)
class MissCurves:
    """Misses by the number of cells, of L layers of E experts."""

    misses: np.ndarray
    """int64[L, E + 1]: misses with c cells in column c, by distances. From `exact_from` on they
    equal the pager's; below, a set does not fit and they are an estimate."""
    exact_from: np.ndarray
    """int64[L]: the largest set that was referenced, counted or not."""
    first: np.ndarray
    """int64[L]: first uses of experts, which `misses` includes."""
    steps: int
    """Steps that were counted."""

    @property
    def references(self) -> np.ndarray:
        """int64[L]: experts referenced, each once in a set."""
        return self.misses[:, 0]

    @property
    def warm(self) -> np.ndarray:
        """int64[L, E + 1]: misses without first sights; 0 in the last column."""
        return self.misses - self.first[:, None]


def gather_curves(steps: Iterable[tuple[Iterable[np.ndarray], bool]]) -> MissCurves | None:
    """Returns the curves of steps, or None if no step is counted. Each step has its references to
    sets bool[L, E] and whether it is counted; a step that is not counted only moves the recency
    list."""
    recency, counted = None, 0
    for references, is_counted in steps:
        counted += is_counted
        for active in references:
            layers, experts = active.shape
            if recency is None:
                recency, largest = cold_recency(layers, experts), np.zeros(layers, np.int64)
                # By distance; in the last column of a layer first sights.
                counts = np.zeros(layers * (experts + 1), np.int64)
            recency, found = reference(recency, active)
            largest = np.maximum(largest, found.sizes)
            if is_counted:
                layer = np.repeat(np.arange(layers), found.sizes)
                distance = np.where(found.is_first, experts, found.place % experts)
                place = layer * (experts + 1) + distance
                counts += np.bincount(place, minlength=len(counts))
    if not counted:
        return None
    by_layer = counts.reshape(len(largest), -1)
    return MissCurves(tails(by_layer)[:, :-1], largest, by_layer[:, -1], counted)


def trace_curves(trace: Trace, *, kind: str | None = None, user: int | None = None) -> MissCurves:
    """Returns the curves of a trace's steps, from a cold start.

    - `kind`: count only steps of this kind (`prefill` or `decode`); the others still move the
      recency list.
    - `user`: take only the tokens of this user (token.user), as if served alone.

    Raises TraceError like read_step_sets, and for a trace without such a step.
    """
    if kind is not None and "step.kind" in trace.header.absent:
        raise TraceError(f"{trace.directory} has no step.kind: it was converted or generated")
    found = gather_curves(
        (in_waves(step.active, step.waves), kind is None or step.kind == kind)
        for step in read_step_sets(trace, user=user)
        if user is None or step.active.any()  # else others', which are no reference of this user's
    )
    if found is None:
        whose = "" if user is None else f" of user {user}"
        raise TraceError(f"the trace {trace.directory} has no {kind or 'steps'} to look at{whose}")
    return found


# ---- KV

_PAGE_BITS = 32


class PageRecency(NamedTuple):
    """Recency list of KV pages between turns; P of them. Never changed in place."""

    keys: np.ndarray = np.zeros(0, np.int64)
    """int64[P]: (session, page), the last used first; of one turn the higher page first."""
    deepest: np.ndarray = np.zeros(0, np.int64)
    """int64[P]: the deepest place that a page had since its last use. A pool of N pages still has
    the page iff that place is below N. Released pages make room, but do not bring others back."""


def page_references(
    recency: PageRecency, pages: np.ndarray, limit: int | None = None
) -> tuple[PageRecency, np.ndarray]:
    """Ends a turn that held `pages`. Returns the new list and the finite distances of the turn's
    pages, int64[R'], R' ≤ R: pages that were never used before are left out.

    - `pages`: int64[R, 2], (session, page), each once. Pages of a session below 0 (a request
      without one) take room during the turn and are released at its end.
    - `limit`: pages deeper than this are forgotten, and are new when they come back; for an
      estimator whose pool is never larger.
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
    """Returns a histogram of distances as if every held page came back now, times decay^(turns −
    1): float64[largest]. Pages deeper than `largest` are left out.

    - `turns`: turns that have ended, ≥ 1.

    Add it to a histogram with that decay that began empty, since what came back during the first
    turns does not show what KV is worth. Ours; docs/explanation/miss_curves.md.
    """
    depths = recency.deepest[recency.deepest < largest]
    return decay ** (turns - 1) * np.bincount(depths, minlength=largest)


def page_keys(pages: np.ndarray) -> np.ndarray:
    """Returns keys int64[R] of (session, page) int64[R, 2], descending; negative for a negative
    session."""
    session, page = np.asarray(pages, np.int64).reshape(-1, 2).T
    return np.sort((session << _PAGE_BITS) | page)[::-1]
