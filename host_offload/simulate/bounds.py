"""Computes the fewest experts that any policy must move.

A cache holds experts between two steps, at most as many as it has cells. A step costs a transfer
for each needed expert that is not resident; a transfer ahead of need costs as much. So an expert
that stays from one use to the next saves one transfer and takes a cell at each moment between the
two steps. Inside a step nothing is asked of the cache, so the bounds hold for every policy of the
engine, whatever its fills, transfers and waves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError
from host_offload.traces.step_sets import read_step_sets

_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class References:
    """The references of a sequence of step sets, each step's members once; R in all, ordered by
    step, layer, expert."""

    steps: int
    layers: int
    experts: int
    step: np.ndarray
    """int[R]: place of the step in the sequence."""
    layer: np.ndarray
    """int[R]"""
    expert: np.ndarray
    """int[R]"""
    unknown: tuple[int, ...] = ()
    """Steps, ascending, before which steps were left out, so anything may be resident there. A
    sequence without any begins cold, with nothing resident."""

    @property
    def largest(self) -> np.ndarray:
        """int64[L]: size of each layer's largest step set."""
        sizes = np.bincount(
            self.step * self.layers + self.layer, minlength=self.steps * self.layers
        )
        return sizes.reshape(self.steps, self.layers).max(axis=0, initial=0)


def read_references(trace: Trace, kind: str | None = None) -> References:
    """Returns the references of a trace.

    - `kind`: take only steps of this kind, `prefill` or `decode`; what a cache holds where steps
      were left out is then unknown.

    Raises like read_step_sets, and TraceError if the trace has no such step or does not know kinds.
    """
    if kind is not None and "step.kind" in trace.header.absent:
        raise TraceError(f"{trace.directory} has no step.kind: it was converted or generated")
    parts, places = [], []
    for place, step in enumerate(read_step_sets(trace)):
        if kind is None or step.kind == kind:
            layer, expert = np.nonzero(step.active)
            parts.append((np.full(len(layer), len(places)), layer, expert))
            places.append(place)
    if not places:
        raise TraceError(f"the trace {trace.directory} has no {kind or 'steps'} to look at")
    unknown = () if kind is None else (0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist())
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    header = trace.header
    return References(len(places), header.layers, header.experts, *columns, unknown=unknown)


def in_one_pool(references: References) -> References:
    """Returns the same references as seen by a policy whose cells are one pool for all layers:
    layers one after the other, L steps for each step, of one layer with L·E experts."""
    layers, experts = references.layers, references.experts
    return References(
        steps=references.steps * layers,
        layers=1,
        experts=layers * experts,
        step=references.step * layers + references.layer,
        layer=np.zeros_like(references.layer),
        expert=references.layer * experts + references.expert,
        unknown=tuple(step * layers for step in references.unknown),
    )


def min_transfers(references: References, cells: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the fewest experts that any policy must move, on demand or ahead, with cells[l] cells
    in each layer: int64[L] (for one pool: in_one_pool).

    MIN (Belady 1966) for sets and with bypass: after each step, those experts stay whose next use
    is nearest. That keeps the largest number of intervals between uses of which no more than
    `cells` overlap (Faigle & Nawijn 1995), so no policy saves more transfers. If steps were left
    out (references.unknown), the cache may hold anything there, at no cost.

    Raises ValueError for a layer with fewer cells than its largest step set: no bound is claimed
    there.
    """
    held = np.broadcast_to(np.asarray(cells, np.int64), references.layers)
    largest = references.largest
    if (short := np.flatnonzero(held < largest)).size:
        layer = int(short[0])
        raise ValueError(
            f"layer {layer} has {held[layer]} cells, its largest set {largest[layer]} experts; "
            "no bound is claimed below the largest step set"
        )
    moved = np.zeros(references.layers, np.int64)
    starts = sorted({0, *references.unknown})
    for start, end in itertools.pairwise((*starts, references.steps)):
        moved += _run_transfers(references, start, end, held)
    return moved


def _run_transfers(references: References, start: int, end: int, held: np.ndarray) -> np.ndarray:
    """Returns the transfers of steps start … end − 1, among which nothing was left out:
    int64[L]."""
    part = slice(*np.searchsorted(references.step, [start, end]).tolist())
    step, layer, expert = (
        column[part] for column in (references.step, references.layer, references.expert)
    )
    shape = references.layers, references.experts
    place = layer * references.experts + expert
    # Use and expert in one number: no ties, so a threshold picks exactly as many as fit.
    rank = step * references.experts + expert
    following, order = np.full(len(rank), _NEVER), np.argsort(place, kind="stable")
    again = place[order[1:]] == place[order[:-1]]
    following[order[:-1][again]] = rank[order[1:][again]]
    kept = np.full(shape[0] * shape[1], _NEVER)
    if start in references.unknown:
        first = np.unique(place, return_index=True)[1]
        kept[place[first]] = rank[first]
        _keep_nearest(kept.reshape(shape), held)
    moved = np.zeros(shape[0], np.int64)
    for now in np.split(np.arange(len(step)), np.flatnonzero(np.diff(step)) + 1):
        missed = layer[now][kept[place[now]] == _NEVER]
        moved += np.bincount(missed, minlength=shape[0])
        kept[place[now]] = following[now]
        _keep_nearest(kept.reshape(shape), held)
    return moved


def _keep_nearest(kept: np.ndarray, cells: np.ndarray) -> None:
    """Drops all but the `cells` smallest ranks of each layer."""
    rows = np.flatnonzero(np.count_nonzero(kept != _NEVER, axis=1) > cells)
    if not rows.size:
        return
    ranks = kept[rows]
    last = np.sort(ranks, axis=1)[np.arange(rows.size), cells[rows] - 1]
    ranks[ranks > np.where(cells[rows] > 0, last, -1)[:, None]] = _NEVER
    kept[rows] = ranks
