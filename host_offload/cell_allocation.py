"""Slots per layer: how many cells each layer gets of a number of slots, by its miss curve.

Ours: WiSP gives every layer as many. The marginal rule is the paper's equation (5) across layers
instead of across experts and KV: the next slot goes where it saves most.
"""

from __future__ import annotations

import dataclasses

import numpy as np

ALLOCATIONS = ("uniform", "marginal", "optimal")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Slots shared over L layers."""

    cells: np.ndarray
    """int64[L]"""
    misses: float
    """The curves' sum at `cells`."""
    gap: float
    """The optimum is at most so far below `misses`; 0 for `optimal`."""


def allocate(
    rule: str, misses: np.ndarray, slots: int, *, least: int | np.ndarray = 0
) -> Allocation:
    """Shares slots over layers by one of ALLOCATIONS; what no layer can use stays unused.

    misses: float64[L, C + 1], non-increasing along c, in any unit that adds up over layers (misses,
    seconds). least: the least cells, of every layer or int[L].

    uniform: as many each, the first layers take the remainder. marginal: greedy along the lower
    convex hulls, looking ahead where a curve is not convex, or uniform where that misses less; the
    optimum lies above the hulls, which gives `gap`: at most what the one hull piece saves that did
    not fit. optimal: dynamic programming over the layers, O(L·slots·C). So optimal ≤ marginal ≤
    uniform in misses.

    Raises ValueError for another rule, for curves that increase, and for fewer slots than `least`
    takes.
    """
    curves = np.asarray(misses, np.float64)
    if rule not in ALLOCATIONS:
        raise ValueError(f"cells are {', '.join(ALLOCATIONS)}, not {rule!r}")
    if curves.ndim != 2 or not curves.size or (np.diff(curves, axis=1) > 0).any():
        raise ValueError("misses must be curves [L, C + 1] that never increase with the cells")
    layers, most = curves.shape[0], curves.shape[1] - 1
    floor = np.broadcast_to(np.asarray(least, np.int64), layers)
    if floor.min() < 0 or floor.max() > most or floor.sum() > slots:
        raise ValueError(
            f"{slots} slots cannot give {layers} layers their least cells, {floor.sum()} in all, "
            f"of at most {most} each"
        )
    slots = min(int(slots), layers * most)
    bound = float(hull_misses(curves, np.array([slots]), floor)[0])
    cells = _uniform(layers, most, slots, floor)
    if rule == "marginal":
        greedy = _marginal(curves, slots, floor)
        if _total(curves, greedy) < _total(curves, cells):
            cells = greedy
    elif rule == "optimal":
        cells = _optimal(curves, slots, floor)
    total = _total(curves, cells)
    return Allocation(cells, total, 0.0 if rule == "optimal" else max(total - bound, 0.0))


def _total(curves: np.ndarray, cells: np.ndarray) -> float:
    return float(curves[np.arange(len(curves)), cells].sum())


def _uniform(layers: int, most: int, slots: int, floor: np.ndarray) -> np.ndarray:
    """The floors, then one more for whoever has least, lower layers first."""
    level = int(
        np.searchsorted([np.maximum(floor, c).sum() for c in range(most + 1)], slots, "right")
    )
    cells = np.maximum(floor, level - 1)
    open_layers = np.flatnonzero(cells == level - 1)
    open_layers = open_layers[floor[open_layers] < level] if level <= most else open_layers[:0]
    cells[open_layers[: slots - int(cells.sum())]] += 1
    return cells


class _Pieces:
    """The pieces of all layers' lower convex hulls from their floors on, the steepest first; of
    each layer in order, since hulls are convex."""

    def __init__(self, curves: np.ndarray, floor: np.ndarray):
        hulls = [
            lower_hull(curve, np.flatnonzero(may_be))
            for curve, may_be in zip(curves, _may_be_corners(curves, floor), strict=True)
        ]
        self.layer = np.repeat(np.arange(len(hulls)), [len(hull) - 1 for hull in hulls])
        self.width = np.concatenate([np.diff(hull) for hull in hulls])
        self.saved = np.concatenate(
            [-np.diff(curve[hull]) for curve, hull in zip(curves, hulls, strict=True)]
        )
        order = np.lexsort((self.layer, -self.saved / self.width))
        self.layer, self.width, self.saved = (
            part[order] for part in (self.layer, self.width, self.saved)
        )


def _may_be_corners(curves: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """bool[L, C + 1]: what is not above a chord of its own curve, for some chords: most places that
    are no corners of a hull, without a loop over them."""
    columns = curves.shape[1]
    place = np.arange(columns)
    kept = place >= floor[:, None]
    reach = 1
    while 2 * reach < columns:
        above = 2 * curves[:, reach:-reach] >= curves[:, : -2 * reach] + curves[:, 2 * reach :]
        # A chord begins at the floor at the earliest.
        kept[:, reach:-reach] &= ~above | (place[: columns - 2 * reach] < floor[:, None])
        reach *= 2
    return kept


def lower_hull(curve: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """int64[H]: places of the corners of a curve's lower convex hull, both ends included (Andrew's
    monotone chain). places: ascending, those that may be corners; None: all."""
    corners: list[int] = []
    values = curve.tolist()
    for c in range(len(values)) if places is None else places.tolist():
        while len(corners) > 1:
            a, b = corners[-2:]
            if (values[b] - values[a]) * (c - a) < (values[c] - values[a]) * (b - a):
                break
            corners.pop()
        corners.append(c)
    return np.array(corners)


def hull_misses(misses: np.ndarray, slots: np.ndarray, least: int | np.ndarray = 0) -> np.ndarray:
    """float64[n]: what the lower hulls of curves [L, C + 1] have with slots int[n] in all, one
    piece in part. No allocation is below it; where pieces end (everywhere, if curves are convex)
    the marginal one is equal."""
    curves = np.asarray(misses, np.float64)
    floor = np.broadcast_to(np.asarray(least, np.int64), len(curves))
    pieces = _Pieces(curves, floor)
    used = np.concatenate([[0], np.cumsum(pieces.width)]) + floor.sum()
    saved = np.concatenate([[0.0], np.cumsum(pieces.saved)])
    return _total(curves, floor) - np.interp(slots, used, saved)


def _marginal(curves: np.ndarray, slots: int, floor: np.ndarray) -> np.ndarray:
    pieces = _Pieces(curves, floor)
    cells, room = floor.copy(), slots - int(floor.sum())
    whole = int(np.searchsorted(np.cumsum(pieces.width), room, side="right"))
    np.add.at(cells, pieces.layer[:whole], pieces.width[:whole])
    room = slots - int(cells.sum())
    # Less than a piece is left: the best saving per slot within reach, again and again.
    most = curves.shape[1] - 1
    while room:
        reach = np.minimum(cells[:, None] + np.arange(1, room + 1), most)
        saved = curves[np.arange(len(cells)), cells][:, None] - np.take_along_axis(curves, reach, 1)
        rate = np.where(reach > cells[:, None], saved / np.maximum(reach - cells[:, None], 1), -1.0)
        layer, more = np.unravel_index(int(rate.argmax()), rate.shape)
        cells[layer] = reach[layer, more]
        room = slots - int(cells.sum())
    return cells


def _optimal(curves: np.ndarray, slots: int, floor: np.ndarray) -> np.ndarray:
    """Min-plus products, a layer at a time: best[k] = min over c of before[k − c] + curve[c]."""
    best = np.full(slots + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((len(curves), slots + 1), np.int16)
    for layer, curve in enumerate(curves):
        before, best = best, np.full(slots + 1, np.inf)
        for c in range(int(floor[layer]), min(curves.shape[1] - 1, slots) + 1):
            sums = before[: slots + 1 - c] + curve[c]
            better = sums < best[c:]
            np.copyto(best[c:], sums, where=better)
            np.copyto(chosen[layer, c:], np.int16(c), where=better)
    cells, room = np.zeros(len(curves), np.int64), slots
    for layer in range(len(curves) - 1, -1, -1):
        cells[layer] = chosen[layer, room]
        room -= cells[layer]
    return cells
