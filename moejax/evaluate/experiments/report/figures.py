"""Draws the plots of a report as SVG, with matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moejax.evaluate.experiments.records import Line
from moejax.evaluate.experiments.report.tables import (
    Panel,
    count_moved,
    labels,
    lines_by_place,
    short_name,
)

MIB = 2**20

Interval = tuple[float, float, float]
"""A value and the ends of its 95% interval; without an interval they equal the value."""


class Series(NamedTuple):
    """A line of a plot."""

    name: str
    points: list[tuple[float, Interval]]
    bound: bool = False
    """Whether the line is a bound of all policies: dashed, in grey."""


class Plot(NamedTuple):
    name: str
    y_label: str
    series: list[Series]
    log: bool = False
    places: Sequence[str] = ()
    """Names of the places 0, 1, … of the points, drawn one below the other; without any, points are
    at budgets."""


def plots_of(panel: Panel) -> Iterator[Plot]:
    """Yields the panel's plots against the budget. A plot of one line compares nothing and is left
    out."""
    if len(panel.lines) < 2:
        return
    whole = [line for line in panel.lines if line["runs"] and line["decode_steps"]]
    # All modes count alike.
    counted = [line for line in whole if line["mode"] == whole[0]["mode"]]
    if counted:
        steps = counted[0]["decode_steps"]
        waits = _series(counted, lambda line: _sure(line["decode_misses"] / line["decode_steps"]))
        yield Plot("misses", "misses a decode step", waits)
        all_moved = _series(counted, lambda line: _sure(count_moved(line) / line["decode_steps"]))
        all_moved += _bound(panel, "MIN", lambda line: line["decode_misses"] / steps)
        all_moved += _bound(panel, "MIN, one pool", lambda line: line["pool_misses"] / steps)
        yield Plot("moved", "experts moved a decode step", all_moved)
    timed = [line for line in panel.lines if line.get("tpot_p50_s")]
    if not timed:
        return
    steps, times = timed[0]["decode_steps"] or 1, _series(timed, _tpot)
    if link := panel.link:
        floor = _bound(panel, "link", lambda line: line["decode_bytes"] / steps / link * 1e3)
        times += [one._replace(name="MIN over the link") for one in floor]
    repeats = max(line["runs"] for line in timed)
    stated = f"median of {repeats:.0f}, bars: 95%"
    yield Plot("times", f"ms an output token ({stated})", times, log=True)
    ratios = [line for line in timed if line.get("tpot_p50_s_ratio")]
    if len({line["policy"] for line in ratios}) > 1:
        yield Plot("ratios", f"ms an output token / baseline's ({stated})", _series(ratios, _ratio))


def plots_beside(baseline: str, shown: Sequence[Panel]) -> Iterator[Plot]:
    """Yields plots of all policies' ratios to the baseline over all texts, batches and links: of
    what they moved, and of times."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {"moved": {}, "time": {}}
    for (title, precision, _), lines in lines_by_place(shown).items():
        for policy, line in lines.items() if baseline in lines else ():
            if policy == baseline:
                continue
            place, moved = f"{title} · {precision}", count_moved(lines[baseline])
            found = {"moved": count_moved(line) / moved if moved else None}
            found["time"] = line.get("tpot_p50_s_ratio")
            for name, ratio in found.items():
                if ratio:
                    of = ratios[name].setdefault(short_name(policy), {})
                    of.setdefault(place, []).append(ratio)
    names = {"moved": "experts moved", "time": "ms an output token"}
    for name, each in ratios.items():
        places = list(dict.fromkeys(place for points in each.values() for place in points))
        if len(places) > 1:
            label = f"{names[name]} / {baseline}'s (mean of budgets, bars: least to most)"
            series = [
                Series(policy, [(places.index(p), _spread(found)) for p, found in points.items()])
                for policy, points in each.items()
            ]
            yield Plot(f"all-{name}", label, series, places=_distinct_parts(places))


def _spread(ratios: Sequence[float]) -> Interval:
    """Returns the geometric mean of ratios, the least and the largest."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios)


def _distinct_parts(places: Sequence[str]) -> list[str]:
    """Returns names without the parts that all have."""
    parts = [place.split(" · ") for place in places]
    common = set.intersection(*map(set, parts))
    return [" · ".join(part for part in each if part not in common) or "no link" for each in parts]


def _sure(value: float) -> Interval:
    return value, value, value


def _interval(line: Line, name: str, scale: float) -> Interval:
    value = line[name]
    ends = value, line.get(f"{name}_low") or value, line.get(f"{name}_high") or value
    return ends[0] * scale, ends[1] * scale, ends[2] * scale


def _tpot(line: Line) -> Interval:
    return _interval(line, "tpot_p50_s", 1e3)


def _ratio(line: Line) -> Interval:
    return _interval(line, "tpot_p50_s_ratio", 1)


def _series(lines: Sequence[Line], value: Callable[[Line], Interval]) -> list[Series]:
    points: dict[str, list[tuple[float, Interval]]] = {}
    for name, line in zip(labels(lines), lines, strict=True):
        points.setdefault(name, []).append((line["expert_bytes"] / MIB, value(line)))
    return [Series(name, sorted(found)) for name, found in points.items()]


def _bound(panel: Panel, name: str, value: Callable[[Line], float]) -> list[Series]:
    points = sorted((line["expert_bytes"] / MIB, _sure(value(line))) for line in panel.bounds)
    return [Series(name, points, True)] if points else []


def points_of(plot: Plot) -> Iterator[tuple[object, ...]]:
    """Yields the rows of a table of the plot's points, headings first."""
    if plot.places:
        yield "line", "place", plot.y_label, "from", "to"
    else:
        yield "line", "MiB of experts", plot.y_label, "95% from", "to"
    for one in plot.series:
        for x, (y, low, high) in one.points:
            yield one.name, plot.places[int(x)] if plot.places else x, y, low, high


def draw(plot: Plot) -> str:
    """Draws the plot as an SVG element. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name, "font.size": 9}):
        rows = len(plot.places) * len(plot.series)
        figure = Figure(figsize=(5.2, max(3.6, 1.6 + 0.12 * rows)), layout="constrained")
        axes, markers = figure.subplots(), "osD^vPX"
        # On one line the longer labels would be cut off.
        label = plot.y_label.replace(" (", "\n(")
        for i, one in enumerate(plot.series):
            xs, ys = [x for x, _ in one.points], [y for _, (y, _, _) in one.points]
            if one.bound:
                line, mark = ("--", ":", "-.")[i % 3], None
                if len(xs) == 1:  # there is no line through one point
                    mark = "_"
                axes.plot(xs, ys, line, color="grey", marker=mark, markersize=16, label=one.name)
                continue
            ends = [[y - low for _, (y, low, _) in one.points]]
            ends.append([high - y for _, (y, _, high) in one.points])
            style = {"marker": markers[i % len(markers)], "markersize": 4, "capsize": 2}
            if plot.places:  # side by side within a place
                at = [x + 0.7 * ((i + 0.5) / len(plot.series) - 0.5) for x in xs]
                axes.errorbar(ys, at, xerr=ends, label=one.name, linestyle="none", **style)
            else:
                axes.errorbar(xs, ys, yerr=ends, label=one.name, **style)
        if plot.places:
            axes.set(xlabel=label, yticks=range(len(plot.places)), yticklabels=plot.places)
            axes.axvline(1, color="grey", linestyle="--")
            axes.invert_yaxis()
            return _svg_of(figure, axes)
        axes.set(xlabel="MiB of experts on the device", ylabel=label)
        drawn = [y for one in plot.series if not one.bound for _, ends in one.points for y in ends]
        if plot.log and min(drawn) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            # A bound that is far below would press the data into a line.
            axes.set_ylim(min(drawn) / 1.5, max(drawn) * 1.5)
        else:
            axes.set_ylim(bottom=0)
        return _svg_of(figure, axes)


def _svg_of(figure: Any, axes: Any) -> str:
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    return svg[svg.index("<svg") :]
