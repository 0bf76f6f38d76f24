"""Miss curves: how many misses LRU has at every number of cells, from one look at the references.

WiSP, equation (3): a reference hits with c cells iff its distance (traces.recency) is below c. Each
wave of a prefill step is a reference of its own. docs/miss_curves.md explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from host_offload.traces.reader import Trace
from host_offload.traces.recency import Recency, cold_recency, reference, tails
from host_offload.traces.schema import KINDS, TraceError
from host_offload.traces.step_sets import in_waves, read_step_sets


class LiveCurves(NamedTuple):
    """Miss curves of L layers of E experts while requests run: distances as they come, in
    histograms that forget. Never changed in place; first sights are left out, since at a cold start
    they would pull memory to whom was seen least (WiSP, Algorithm 2)."""

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
        active[(ids + np.arange(0, layers * experts, experts)[:, None]).reshape(-1)] = True
        return self.reference(active)

    def reference(self, active: np.ndarray) -> LiveCurves:
        """One reference to sets bool[L, E]."""
        recency, found = reference(self.recency, active)
        warm = found.place[~found.is_first] if found.is_first.any() else found.place
        gathered = self.gathered + np.bincount(warm, minlength=len(self.gathered))
        return LiveCurves(recency, gathered, self.histogram)

    def forget(self, decay: float) -> LiveCurves:
        """H ← decay·H + what was gathered."""
        histogram = decay * self.histogram + self.gathered.reshape(self.histogram.shape)
        return LiveCurves(self.recency, np.zeros_like(self.gathered), histogram)


def cold_curves(layers: int, experts: int) -> LiveCurves:
    recency = cold_recency(layers, experts)
    return LiveCurves(recency, np.zeros(layers * experts, np.int64), np.zeros((layers, experts)))


@dataclasses.dataclass(frozen=True)
class MissCurves:
    """Misses by the number of cells, of M rows (layers; with V versions V·L of them) of E items."""

    misses: np.ndarray
    """int64[M, E + 1]: column c is with c cells, by distances. From `exact_from` on it is what the
    pager does; below, where a set does not fit, an estimate."""
    least: np.ndarray
    """int64[M, E + 1]: a lower bound everywhere, equal to `misses` from `exact_from` on."""
    exact_from: np.ndarray
    """int64[M]: the largest set that was referenced, counted or not."""
    references: np.ndarray
    """int64[M]: items referenced, each once in a set."""
    first: np.ndarray
    """int64[M]: those of them that were never used before; they are in `misses`."""
    steps: int
    """Steps that were counted."""

    @property
    def warm(self) -> np.ndarray:
        """int64[M, E + 1]: misses without first sights; 0 in the last column."""
        return self.misses - self.first[:, None]


class CurveCounts:
    """Gathers references of M rows of E items into curves."""

    def __init__(self, rows: int, items: int):
        self.items = items
        self.recency = cold_recency(rows, items)
        self._largest = np.zeros(rows, np.int64)
        self._steps = 0
        self._sizes: list[np.ndarray] = []
        self._distances: list[np.ndarray] = []

    def add(self, active: np.ndarray, *, counted: bool = True) -> None:
        """A reference to sets bool[M, E]. counted: it is in the curves; else it only moves the
        recency list."""
        self.recency, found = reference(self.recency, active)
        np.maximum(self._largest, found.sizes, out=self._largest)
        if counted:
            self._sizes.append(found.sizes.astype(np.int32))
            distances = np.where(found.is_first, self.items, found.place % self.items)
            self._distances.append(distances.astype(np.int32))

    def end_step(self) -> None:
        """What was counted since the last one is a step, for `MissCurves.steps`."""
        self._steps += 1

    def curves(self) -> MissCurves:
        rows, items = len(self._largest), self.items
        sizes = np.array(self._sizes, np.int64).reshape(-1, rows)
        distances = np.concatenate([np.zeros(0, np.int32), *self._distances])
        row = np.repeat(np.tile(np.arange(rows), len(sizes)), sizes.ravel())
        counts = np.bincount(row * (items + 1) + distances, minlength=rows * (items + 1))
        counts = counts.reshape(rows, items + 1)
        misses = tails(counts)[:, :-1]
        # With all that the largest set needs, a set has these misses, and with fewer cells no
        # fewer (docs/miss_curves.md); with c cells at most c of its members can be there.
        missed = distances >= self._largest[row]
        place = np.repeat(np.arange(sizes.size), sizes.ravel())
        missing = np.bincount(place[missed], minlength=sizes.size).reshape(sizes.shape)
        least = misses.copy()
        for c in range(int(self._largest.max(initial=0))):
            bound = np.maximum(sizes - c, missing).sum(axis=0)
            least[:, c] = np.where(c < self._largest, bound, least[:, c])
        return MissCurves(
            misses, least, self._largest.copy(), counts.sum(axis=1), counts[:, items], self._steps
        )


def curves_of(references: Iterable[np.ndarray]) -> MissCurves:
    """Curves of references to sets bool[M, E], one after the other, each a step. Raises ValueError
    for none."""
    counts = None
    for active in references:
        counts = counts or CurveCounts(*active.shape)
        counts.add(active)
        counts.end_step()
    if counts is None:
        raise ValueError("a miss curve needs at least one reference")
    return counts.curves()


def trace_curves(
    trace: Trace,
    *,
    kind: str | None = None,
    user: int | None = None,
    first: int = 0,
    last: int | None = None,
    versions: np.ndarray | None = None,
) -> MissCurves:
    """Curves of the steps of a trace, from a cold start.

    kind (`prefill` or `decode`), first, last: count only steps of that kind, and of the trace's
    steps first … last − 1; the others still move the recency list. user: only the tokens of that
    user (token.user), as if served alone. versions int8[L, E]: each expert's version; cells of a
    version hold experts of that version only, so row v·L + l is the list of layer l's version v.

    Raises TraceError as read_step_sets does, and for a trace without such a step.
    """
    header = trace.header
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind is not None and "step.kind" in header.absent:
        raise TraceError(f"{trace.directory} has no step.kind: it was converted or generated")
    number = 1 if versions is None else int(versions.max()) + 1
    counts = CurveCounts(number * header.layers, header.experts)
    for place, step in enumerate(read_step_sets(trace, user=user)):
        wanted = first <= place and (last is None or place < last)
        wanted &= kind is None or step.kind == KINDS.index(kind)
        if user is not None and not step.active.any():
            continue  # others' steps, which are no reference of this user's
        for due in in_waves(step.active, step.waves):
            if versions is not None:
                due = np.concatenate([due & (versions == v) for v in range(number)])
            counts.add(due, counted=wanted)
        if wanted and step.active.any():
            counts.end_step()
    curves = counts.curves()
    if not curves.steps:
        whose = "" if user is None else f" of user {user}"
        raise TraceError(
            f"the trace {trace.directory} has no {kind or 'steps'} to look at{whose}, in steps "
            f"{first}…{'' if last is None else last - 1}"
        )
    return curves
