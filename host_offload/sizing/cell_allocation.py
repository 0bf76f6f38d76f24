"""Shares slots over layers: how many cells each layer gets, by its miss curve. This is ours; WiSP
gives every layer equally many. docs/explanation/miss_curves.md explains it."""

from __future__ import annotations

import dataclasses

import numpy as np

ALLOCATIONS = ("uniform", "marginal")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Slots shared over L layers."""

    cells: np.ndarray
    """int64[L]"""
    misses: float
    """The curves' sum at `cells`."""


def allocate(
    rule: str, misses: np.ndarray, slots: int, *, least: int | np.ndarray = 0
) -> Allocation:
    """Shares slots over layers by one of ALLOCATIONS. Slots that no layer can use stay unused.

    - `misses`: float64[L, C + 1], non-increasing along c, in any unit that adds up over layers
      (misses, seconds).
    - `least`: least cells of every layer, or int[L].

    `marginal` never has more misses than `uniform`, and exceeds hull_misses by at most what one
    piece of a hull saves.

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
    cells = _uniform(layers, most, slots, floor)
    if rule == "marginal":
        greedy = _marginal(curves, slots, floor)
        if _total(curves, greedy) < _total(curves, cells):
            cells = greedy
    return Allocation(cells, _total(curves, cells))


def share_anew(
    rule: str,
    misses: np.ndarray,
    slots: int,
    cells: np.ndarray,
    *,
    gate: float,
    least: int | np.ndarray = 0,
) -> np.ndarray | None:
    """Shares as many slots as `cells` has by `allocate`, int64[L]. Returns None if that saves at
    most `gate` of the misses that the curves have at `cells`."""
    enough = (1 - gate) * misses[np.arange(len(misses)), cells].sum()
    # No allocation is below the hulls, so stop if the hulls promise nothing.
    if hull_misses(misses, np.array([slots]), least)[0] >= enough:
        return None
    found = allocate(rule, misses, slots, least=least)
    return found.cells if found.misses < enough else None


def _total(curves: np.ndarray, cells: np.ndarray) -> float:
    return float(curves[np.arange(len(curves)), cells].sum())


def _uniform(layers: int, most: int, slots: int, floor: np.ndarray) -> np.ndarray:
    """Gives each layer its floor, then one more cell at a time to the layer with the fewest, lower
    layers first."""
    filled = np.maximum(floor, np.arange(most + 1)[:, None]).sum(axis=1)
    level = int(np.searchsorted(filled, slots, "right"))
    cells = np.maximum(floor, level - 1)
    open_layers = np.flatnonzero(cells == level - 1)
    open_layers = open_layers[floor[open_layers] < level] if level <= most else open_layers[:0]
    cells[open_layers[: slots - int(cells.sum())]] += 1
    return cells


class _Pieces:
    """The pieces of all layers' lower convex hulls above their floors, the steepest first. The
    pieces of a layer stay in order, since hulls are convex."""

    def __init__(self, curves: np.ndarray, floor: np.ndarray):
        corner = lower_hulls(curves, floor)
        layer, place = np.divmod(corner, curves.shape[1])
        inner = np.flatnonzero(layer[1:] == layer[:-1])
        layer, width = layer[inner], np.diff(place)[inner]
        saved = -np.diff(curves.reshape(-1)[corner])[inner]
        # A stable sort: of equals the lower layers first.
        order = np.argsort(-saved / width, kind="stable")
        self.layer, self.width, self.saved = layer[order], width[order], saved[order]
        self.used = np.concatenate([[0], np.cumsum(self.width)]) + int(floor.sum())
        """Slots used after each number of pieces."""


def lower_hulls(curves: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Returns the corners of each row's lower convex hull from its floor int[L] on, both ends
    included: int64[H], ascending places in the flat array [L·(C + 1)]. It treats all rows at once:
    a point that is not below the line between its neighbours is removed, again and again until all
    points are corners (some ten rounds)."""
    columns = curves.shape[1]
    place = np.flatnonzero(np.arange(columns) >= floor[:, None])
    value, row = curves.reshape(-1)[place], place // columns
    while True:
        slope = np.diff(value) / np.diff(place)
        kept = np.ones(len(place), bool)
        kept[1:-1] = (slope[:-1] < slope[1:]) | (row[:-2] != row[2:])
        if kept.all():
            return place
        place, value, row = place[kept], value[kept], row[kept]


def hull_misses(misses: np.ndarray, slots: np.ndarray, least: int | np.ndarray = 0) -> np.ndarray:
    """Returns the misses of the lower hulls of curves [L, C + 1] with int[n] slots in all, one
    piece in part: float64[n]. No allocation is below it. At the ends of pieces (everywhere, if
    curves are convex) the marginal allocation equals it."""
    curves = np.asarray(misses, np.float64)
    floor = np.broadcast_to(np.asarray(least, np.int64), len(curves))
    pieces = _Pieces(curves, floor)
    saved = np.concatenate([[0.0], np.cumsum(pieces.saved)])
    return _total(curves, floor) - np.interp(slots, pieces.used, saved)


def _marginal(curves: np.ndarray, slots: int, floor: np.ndarray) -> np.ndarray:
    """Gives slots to the steepest pieces of the hulls first."""
    cells, pieces = floor.copy(), _Pieces(curves, floor)
    whole = int(np.searchsorted(pieces.used, slots, side="right")) - 1
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
