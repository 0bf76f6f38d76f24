"""Plots as SVG, drawn by hand: they need no library, and follow the reader's light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from moejax.evaluate.experiments.report.content import Series

STYLE = """\
.plot{--ink:#1a1a1a;--soft:#6b6b6b;--grid:#e2e2e2;--paper:#ffffff;--c0:#0072b2;--c1:#d55e00;
--c2:#007a5a;--c3:#aa4499;--c4:#8c6d00;--c5:#3b8fd0;--c6:#555555;font:11px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.plot{--ink:#ececec;--soft:#a3a3a3;--grid:#3a3a3a;
--paper:#161616;--c0:#56b4e9;--c1:#ff8c42;--c2:#2fcb9b;--c3:#e29ac9;--c4:#e6c229;--c5:#9bd1ff;
--c6:#c8c8c8}}
.plot text{fill:var(--ink)}.plot .soft{fill:var(--soft)}.plot .grid{stroke:var(--grid)}
.plot .paper{fill:var(--paper)}.plot .bound{stroke:var(--soft)}
"""
"""Colours after Okabe & Ito, darkened on white and lightened on black to at least 3:1; shapes and
dashes say the same, for who sees no colour."""

COLOURS = 7
_DASHES = ("", "7 3", "2 3")
_BOUNDS = ("5 4", "1.5 3", "9 3 2 3")
_SHAPES = ("circle", "square", "up", "diamond", "down", "cross", "plus")

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 28, 38
_ROW = 16


def figure(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, log: bool = False
) -> str:
    """A plot as an SVG element of its own, with a legend below. log: the y axis, where all values
    are above 0."""
    points = [p for one in series for p in one.points]
    log = log and all(y > 0 for _, y in points)
    xs, ys = _Axis([x for x, _ in points]), _Axis([y for _, y in points], log=log, zero=not log)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = xs.share(point[0]), ys.share(point[1])
        return _LEFT + x * (right - _LEFT), bottom - y * (bottom - _TOP)

    parts = [_text(WIDTH / 2, 16, title, "middle", bold=True)]
    for value in ys.ticks:
        _, y = at((xs.low, value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 5, y + 4, _number(value), "end", soft=True))
    for value in xs.ticks:
        x, _ = at((value, ys.low))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 14, _number(value), "middle", soft=True))
    parts.append(_text((_LEFT + right) / 2, bottom + 30, x_label, "middle", soft=True))
    parts.append(
        f'<text class="soft" transform="translate(12 {(_TOP + bottom) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    for i, one in enumerate(series):
        places = [at(point) for point in one.points]
        if one.bound and len({x for x, _ in places}) == 1:  # at one budget: from side to side
            places = [(_LEFT, places[0][1]), (right, places[0][1])]
        parts.append(_line(i, one, places))
    rows = -(-len(series) // 2)
    for i, one in enumerate(series):
        x, y = 16 + (i % 2) * WIDTH / 2, HEIGHT + 8 + (i // 2) * _ROW
        key = _line(i, one._replace(points=[one.points[0]] * 2), [(x, y - 4), (x + 26, y - 4)])
        parts += [key, _text(x + 34, y, _short(one.name), "start")]
    height = HEIGHT + rows * _ROW + 4
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>'
    )


class _Axis:
    """A range of values and where to write numbers."""

    def __init__(self, values: Sequence[float], *, log: bool = False, zero: bool = False):
        low, high = min(values), max(values)
        self._log = log
        if log:
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
            high = high if high > low else low * 10
            decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
            self.low, self.high, self.ticks = low, high, [10.0**n for n in decades]
            return
        low = 0.0 if zero else low
        span = (high - low) or abs(high) or 1.0
        step = _step(span / 5)
        self.low = 0.0 if zero else math.floor(low / step) * step
        self.high = math.ceil((high or step) / step) * step
        count = round((self.high - self.low) / step)
        self.ticks = [self.low + step * i for i in range(count + 1)]

    def share(self, value: float) -> float:
        if self._log:
            return math.log10(value / self.low) / math.log10(self.high / self.low)
        return (value - self.low) / ((self.high - self.low) or 1.0)


def _step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least so much."""
    power = 10 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * 0.999)


def _line(number: int, one: Series, places: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if one.bound:
        dash = _BOUNDS[number % len(_BOUNDS)]
        return (
            f'<polyline class="bound" fill="none" stroke-width="1.5" stroke-dasharray="{dash}" '
            f'points="{path}"/>'
        )
    colour, dash = f"var(--c{number % COLOURS})", _DASHES[number // COLOURS % len(_DASHES)]
    parts = [
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}" '
        f'points="{path}"/>'
    ]
    for (x, y), (given_x, given_y) in zip(places, one.points, strict=True):
        said = f"{one.name}: {_number(given_x)}, {_number(given_y)}"
        shape = _shape(_SHAPES[number % len(_SHAPES)], x, y)
        parts.append(
            f'<path d="{shape}" fill="{colour}" stroke="{colour}">'
            f"<title>{escape(said)}</title></path>"
        )
    return "".join(parts)


def _shape(name: str, x: float, y: float, r: float = 3.4) -> str:
    """The path of a marker."""
    at = f"M{x:.1f} {y:.1f}"
    return {
        "circle": f"{at}m{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0",
        "square": f"{at}m{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}z",
        "up": f"{at}m0 {-r}l{r} {2 * r}h{-2 * r}z",
        "down": f"{at}m0 {r}l{r} {-2 * r}h{-2 * r}z",
        "diamond": f"{at}m0 {-1.3 * r}l{r} {1.3 * r}l{-r} {1.3 * r}l{-r} {-1.3 * r}z",
        "cross": f"{at}m{-r} {-r}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
        "plus": f"{at}m{-r} 0h{2 * r}m{-r} {-r}v{2 * r}",
    }[name]


def _text(
    x: float, y: float, text: str, anchor: str, *, soft: bool = False, bold: bool = False
) -> str:
    style = ' class="soft"' if soft else ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _short(name: str) -> str:
    return name if len(name) <= 27 else f"{name[:15]}…{name[-11:]}"
