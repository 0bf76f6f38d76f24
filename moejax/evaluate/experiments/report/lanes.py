"""Timelines of a panel's policies under each other, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moejax.evaluate.experiments.records import PLACE, Records
from moejax.evaluate.experiments.report.content import Panel
from moejax.evaluate.experiments.report.figures import STYLE

MOST = 6
"""Policies that one picture has."""

_KINDS = (
    ("wait", "waits", "c1"),
    ("demand", "moves what is needed", "c4"),
    ("part", "moves ahead of need", "c2"),
    ("", "computes", "c0"),
)
"""What is in an event's name, what it does, its colour; the first that fits."""

_WIDTH, _LEFT, _RIGHT, _LANE, _GAP = 760, 190, 20, 14, 10


def timeline(records: Records, panel: Panel) -> str | None:
    """Some layers in the middle of each policy's run at the panel's smallest budget, predicted over
    the panel's link, all on one scale; None where there are none."""
    known = {tuple(line[key] for key in PLACE): line["events"] for line in records.timelines}
    lines = [line for line in panel.lines if tuple(line[key] for key in PLACE) in known]
    if not lines:
        return None
    least = min(line["expert_bytes"] for line in lines)
    chosen = [line for line in lines if line["expert_bytes"] == least][:MOST]
    runs = [(line, known[tuple(line[key] for key in PLACE)]) for line in chosen]
    longest = max(_end(events) - _begin(events) for _, events in runs) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts, y = [_text(_WIDTH / 2, 16, _title(chosen[0]), "middle", bold=True)], 30
    for line, events in runs:
        parts += [_text(_LEFT - 8, y + 16, line["policy"][-26:], "end")]
        for track in ("device", "link"):
            mine = [event for event in events if event["track"] == track]
            parts += [_bar(event, _begin(events), scale, y) for event in mine]
            y += _LANE
        y += _GAP
    parts.append(_text(_LEFT, y + 6, "0", "middle", soft=True))
    parts.append(_text(_WIDTH - _RIGHT, y + 6, f"{longest * 1e3:.3g} ms", "end", soft=True))
    for i, (_, said, colour) in enumerate(_KINDS):
        x = _LEFT + i % 2 * 250
        below = y + 16 + i // 2 * 18
        parts.append(f'<rect x="{x}" y="{below}" width="12" height="12" fill="var(--{colour})"/>')
        parts.append(_text(x + 18, below + 10, said, "start"))
    height = y + 58
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" aria-label="timeline"><style>{STYLE}</style>'
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>{"".join(parts)}</svg>'
    )


def _title(line: Mapping[str, Any]) -> str:
    return (
        f"predicted timeline, budget {line['budget']}: device above, link {line['link_rate']} below"
    )


def _begin(events: Sequence[Mapping[str, Any]]) -> float:
    return min(event["begin"] for event in events)


def _end(events: Sequence[Mapping[str, Any]]) -> float:
    return max(event["end"] for event in events)


def _bar(event: Mapping[str, Any], begin: float, scale: float, y: int) -> str:
    _, said, colour = next(kind for kind in _KINDS if kind[0] in event["name"])
    x, width = _LEFT + (event["begin"] - begin) * scale, (event["end"] - event["begin"]) * scale
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{_LANE - 2}" '
        f'fill="var(--{colour})"><title>{escape(event["name"])} ({said})</title></rect>'
    )


def _text(
    x: float, y: float, text: str, anchor: str, *, soft: bool = False, bold: bool = False
) -> str:
    style = ' class="soft"' if soft else ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
