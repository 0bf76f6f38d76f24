"""What no policy can do better than: bounds on experts moved, bytes moved and time lost.

A cache holds experts between two steps, at most as many as it has cells. A step costs a transfer
for each expert that it needs and that is not there; a transfer ahead of need costs as much. So an
expert that stays from one use to the next saves one transfer and takes a cell at each moment
between the two steps. Inside a step nothing is asked of the cache, so the bounds hold for every
policy of the engine, whatever its fills, transfers and waves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from host_offload.traces.reader import Trace
from host_offload.traces.schema import KINDS, TraceError
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
    """Steps, ascending, before which something was left out: anything may be resident there. A
    sequence with none begins cold, with nothing resident."""

    @property
    def largest(self) -> np.ndarray:
        """int64[L]: size of each layer's largest step set."""
        sizes = np.bincount(
            self.step * self.layers + self.layer, minlength=self.steps * self.layers
        )
        return sizes.reshape(self.steps, self.layers).max(axis=0, initial=0)


def read_references(trace: Trace, kind: str | None = None) -> References:
    """The references of a trace. kind: of one kind of step only, `prefill` or `decode`; what a
    cache holds where steps were left out is then not known. Raises as read_step_sets, and
    TraceError where no such step is in the trace or the trace does not know."""
    if kind is not None and "step.kind" in trace.header.absent:
        raise TraceError(f"{trace.directory} has no step.kind: it was converted or generated")
    parts, places = [], []
    for place, step in enumerate(read_step_sets(trace)):
        if kind is None or step.kind == KINDS.index(kind):
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
    """The same references as a policy sees them whose cells are one pool for all layers: layers one
    after the other, L steps for each step, of one layer with L·E experts."""
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


# ---- bounds


def min_transfers(references: References, cells: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """int64[L]: the fewest experts that any policy must move, on demand or ahead, with cells[l]
    cells in each layer (for one pool: in_one_pool).

    MIN (Belady 1966) for sets and with bypass: after each step those stay whose next use is
    nearest. That keeps the largest number of intervals between uses of which no more than `cells`
    overlap (Faigle & Nawijn 1995), so no policy saves more transfers.

    Where steps were left out (references.unknown) the cache may hold anything, at no cost.

    Raises ValueError where a layer has fewer cells than its largest step set: no bound is claimed
    there.
    """
    held = _checked(references, cells)
    layers, experts = references.layers, references.experts
    place = references.layer * experts + references.expert
    # Next use and expert in one number: no ties, so a threshold picks exactly as many as fit.
    following = _next_use(references, place)
    rank = np.where(following < 0, _NEVER, following * experts + references.expert)
    ends = np.searchsorted(references.step, np.arange(references.steps + 1))
    runs = _first_uses(references, place)
    kept = np.full((layers, experts), _NEVER)
    moved = np.zeros(layers, np.int64)
    flat = kept.reshape(-1)
    for step in range(references.steps):
        if step in runs:
            first = runs[step]
            kept[:] = _NEVER
            flat[place[first]] = references.step[first] * experts + references.expert[first]
            _keep_nearest(kept, held)
        now = slice(ends[step], ends[step + 1])
        needed = place[now]
        missed = references.layer[now][flat[needed] == _NEVER]
        moved += np.bincount(missed, minlength=layers)
        flat[needed] = rank[now]
        _keep_nearest(kept, held)
    return moved


def min_bytes(references: References, sizes: np.ndarray, capacity: int) -> int:
    """The fewest bytes that any policy must move where experts differ in size and share `capacity`
    bytes: PFOO-L of Berger, Beckmann & Harchol-Balter, "Practical Bounds on Optimal Caching with
    Variable Object Sizes" (2018), weighted by size.

    It lets the cache be over-full at one moment if it is that much emptier at another: intervals
    between uses are kept, the one that saves most bytes for its size × time first, the last one in
    part, until capacity × time is used up. So it lies below the optimum, and below min_transfers
    where sizes are equal.

    sizes: int64[L, E], bytes of each expert in the version it has. Raises ValueError where the
    largest step set does not fit the capacity.
    """
    sizes = np.asarray(sizes, np.int64)
    if sizes.shape != (references.layers, references.experts) or sizes.min(initial=1) < 1:
        raise ValueError(
            f"sizes must be positive and of shape {(references.layers, references.experts)}, not "
            f"{sizes.shape}"
        )
    size = sizes[references.layer, references.expert]
    largest = int(np.bincount(references.step, size, references.steps).max(initial=0))
    if largest > capacity:
        raise ValueError(f"a step needs {largest} bytes of experts, more than {capacity}: no bound")
    place = references.layer * references.experts + references.expert
    following = _next_use(references, place)
    again = following >= 0
    length, value = [(following - references.step)[again]], [size[again]]
    for start, first in _first_uses(references, place).items():
        length.append(references.step[first] - start + 1)
        value.append(size[first])
    length, value = np.concatenate(length), np.concatenate(value)
    # Bytes saved for each byte and moment are 1 / length, whatever the size.
    order = np.argsort(length, kind="stable")
    length, value = length[order], value[order]
    # Moments between steps, and one before each run that may begin with anything.
    moments = references.steps - 1 + (0 in references.unknown)
    room, used = int(capacity) * moments, np.cumsum(length * value)
    whole = int(np.searchsorted(used, room, side="right"))
    saved = int(value[:whole].sum())
    if whole < len(length):
        saved += (room - (int(used[whole - 1]) if whole else 0)) // int(length[whole])
    return int(size.sum()) - saved


def stall_bound(moved: float, compute_s: float, *, seconds_per_byte: float) -> float:
    """Seconds that steps which compute for `compute_s` in all must at least wait for a link that
    moves `moved` bytes, however well both overlap: what the link needs beyond that time.

    With the bytes of min_transfers or min_bytes it bounds every policy, with those of a run that
    run. Raises ValueError for a negative number.
    """
    if min(moved, compute_s, seconds_per_byte) < 0:
        raise ValueError("bytes and seconds cannot be negative")
    return max(moved * seconds_per_byte - compute_s, 0.0)


def _checked(references: References, cells: int | Sequence[int] | np.ndarray) -> np.ndarray:
    held = np.broadcast_to(np.asarray(cells, np.int64), references.layers)
    largest = references.largest
    if (short := np.flatnonzero(held < largest)).size:
        layer = int(short[0])
        raise ValueError(
            f"layer {layer} has {held[layer]} cells, its largest set {largest[layer]} experts; "
            "no bound is claimed below the largest step set"
        )
    return held


def _run(references: References, step: np.ndarray) -> np.ndarray:
    """int[R]: in which run of steps without a gap each step is."""
    return np.searchsorted(np.asarray(references.unknown, np.int64), step, side="right")


def _next_use(references: References, place: np.ndarray) -> np.ndarray:
    """int64[R]: the step that needs the expert next, in the same run; −1: none."""
    order = np.argsort(place, kind="stable")
    run = _run(references, references.step)[order]
    place, step = place[order], references.step[order]
    following = np.full(len(order), -1, np.int64)
    same = (place[1:] == place[:-1]) & (run[1:] == run[:-1])
    following[order[:-1][same]] = step[1:][same]
    return following


def _first_uses(references: References, place: np.ndarray) -> dict[int, np.ndarray]:
    """For each run that may begin with anything, by its first step: which references are the first
    to their experts."""
    first = {}
    starts = references.unknown
    for start, end in zip(starts, (*starts, references.steps)[1:], strict=True):
        begin, stop = np.searchsorted(references.step, [start, end])
        first[start] = begin + np.unique(place[begin:stop], return_index=True)[1]
    return first


def _keep_nearest(kept: np.ndarray, cells: np.ndarray) -> None:
    """Drops all but the `cells` smallest ranks of each layer."""
    rows = np.flatnonzero(np.count_nonzero(kept != _NEVER, axis=1) > cells)
    if not rows.size:
        return
    ranks = kept[rows]
    last = np.sort(ranks, axis=1)[np.arange(rows.size), cells[rows] - 1]
    ranks[ranks > np.where(cells[rows] > 0, last, -1)[:, None]] = _NEVER
    kept[rows] = ranks
