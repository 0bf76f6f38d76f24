"""Draws the plots of a report as SVG, with matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moejax.evaluate.experiments.records import Line
from moejax.evaluate.experiments.report.tables import Panel, count_moved, labels

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
    yield "line", "MiB of experts", plot.y_label, "95% from", "to"
    for one in plot.series:
        for x, (y, low, high) in one.points:
            yield one.name, x, y, low, high


def draw(plot: Plot) -> str:
    """Draws the plot as an SVG element. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name, "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes, markers = figure.subplots(), "osD^vPX"
        for i, one in enumerate(plot.series):
            xs, ys = [x for x, _ in one.points], [y for _, (y, _, _) in one.points]
            if one.bound:
                axes.plot(xs, ys, linestyle=("--", ":", "-.")[i % 3], color="grey", label=one.name)
                continue
            ends = [[y - low for _, (y, low, _) in one.points]]
            ends.append([high - y for _, (y, _, high) in one.points])
            style = {"marker": markers[i % len(markers)], "markersize": 4, "capsize": 2}
            axes.errorbar(xs, ys, yerr=ends, label=one.name, **style)
        # On one line the longer labels would be cut off.
        label = plot.y_label.replace(" (", "\n(")
        axes.set(xlabel="MiB of experts on the device", ylabel=label)
        drawn = [y for one in plot.series if not one.bound for _, ends in one.points for y in ends]
        if plot.log and min(drawn) > 0:
            axes.set_yscale("log")
            for name in ("major", "minor"):
                getattr(axes.yaxis, f"set_{name}_formatter")(lambda y, _: f"{y:g}")
            # A bound that is far below would press the data into a line.
            axes.set_ylim(min(drawn) / 1.5, max(drawn) * 1.5)
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    return svg[svg.index("<svg") :]
