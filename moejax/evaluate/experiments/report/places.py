"""Each policy beside the baseline, over all places of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moejax.evaluate.experiments.records import PLACE, Records
from moejax.evaluate.experiments.report.content import Line, panels

BESIDE = "Beside {baseline}, over all places below full residency"

_TOLD = ("/ its", "less in", "more in", "the least in")
BESIDE_HEADINGS = (
    "policy",
    *(f"{what} {told}" for what in ("moved", "misses") for told in _TOLD),
    "moved / MIN",
)
"""moved: misses and what came ahead of need. A tie for the least counts for everybody."""

_WHERE = tuple(name for name in PLACE if name not in ("policy", "driver", "mode", "seed"))
_COUNTED = ("measured", "simulated")


def beside_baseline(records: Records) -> list[list[str]]:
    """Rows under BESIDE_HEADINGS, of decode steps; an arm that knows the run is never the least.
    None where a grid has one policy or one place."""
    baseline, places = records.asked["baseline"], _places(records)
    names = list(dict.fromkeys(name for place in places for name in place if name != _MIN))
    if len(places) < 2 or len(names) < 2:
        return []
    rows = []
    for name in names:
        row = [name]
        for count in (_moved, _missed):
            both = [p for p in places if name in p and baseline in p]
            pairs = [(count(p[name]), count(p[baseline]), p) for p in both]
            row += [
                _range([mine / its for mine, its, _ in pairs if its]),
                str(sum(mine < its for mine, its, _ in pairs)),
                str(sum(mine > its for mine, its, _ in pairs)),
                str(sum(mine == _least(p, count) for mine, _, p in pairs)),
            ]
        row.append(_range([_moved(p[name]) / _bound(p) for p in places if name in p and _bound(p)]))
        rows.append(row)
    return rows


_MIN = "MIN"


def _places(records: Records) -> list[Mapping[str, Line]]:
    """Policy → its line, of each place below full residency."""
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    for panel in panels(records):
        for line in panel.lines:
            whole = line["runs"] and line["mode"] in _COUNTED
            if whole and line["cells_least"] < line["experts"]:
                place = found.setdefault(tuple(line[key] for key in _WHERE), {})
                place.setdefault(line["policy"], line)
                if line["budget"] in panel.least:
                    place[_MIN] = panel.least[line["budget"]]
    return list(found.values())


def _moved(line: Line) -> float:
    return line["decode_misses"] + line["decode_ahead"]


def _missed(line: Line) -> float:
    return line["decode_misses"]


def _least(place: Mapping[str, Line], count: Any) -> float:
    return min(
        count(line)
        for name, line in place.items()
        if name != _MIN and not line["policy"].startswith("oracle")
    )


def _bound(place: Mapping[str, Line]) -> float:
    """MIN of a place; 0 where none is claimed."""
    return place[_MIN]["decode_misses"] if _MIN in place else 0


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}" if values else "–"
