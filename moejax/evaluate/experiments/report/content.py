"""What a report says, before it is a page: places, lines and series."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.memory.budget import format_bytes
from moejax.evaluate.experiments.definition import NO_LINK
from moejax.evaluate.experiments.records import COUNTS, PLACE, Records
from moejax.sizes import parse_rate

PANEL = ("precision", "link_rate", "batch", "prompt_tokens", "text")
"""What one table and one row of plots is of."""

Line = Mapping[str, Any]
"""A row of Records.summary, with the mean of each number over the seeds."""


class Series(NamedTuple):
    """A line of a plot."""

    name: str
    points: list[tuple[float, float]]
    bound: bool = False
    """What no policy can go below: dashed, in grey."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """The cells of one text, precision, batch and context."""

    title: str
    lines: Sequence[Line]
    least: Mapping[str, Line]
    """Budget → MIN, where it is claimed."""
    link: float | None
    """Bytes a second of the link; None: not measured."""
    active_s: float | None
    """Seconds in which the device's memory gives the experts that a decode step computes with."""


def summarized(records: Records) -> list[Line]:
    """The summary with several seeds of a place as one line."""
    by_seed: dict[tuple[Any, ...], list[Line]] = {}
    for line in records.summary():
        key = tuple(line[name] for name in PLACE if name != "seed")
        by_seed.setdefault(key, []).append(line)
    return [_mean(found) for found in by_seed.values()]


def panels(records: Records) -> list[Panel]:
    """The panels of a report, in the grid's order. Experts in two versions have one policy and no
    panel: what is compared there are precisions. Conversations have a table of their own."""
    lines = [x for x in summarized(records) if "hi" not in x and x["mode"] != "priced"]
    places: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        places.setdefault(tuple(line[name] for name in PANEL), []).append(line)
    return [_panel(records, place, found) for place, found in places.items()]


def _panel(records: Records, place: tuple[Any, ...], lines: Sequence[Line]) -> Panel:
    precision, link_rate, batch, prompt, text = place
    title = (
        f"{text} · {precision} · batch {batch} · {prompt}+{records.asked['output_tokens']} tokens"
    )
    if link_rate != NO_LINK:
        title += f" · link {link_rate}"
    engine = precision, link_rate, batch
    sessions = [
        one
        for one in records.sessions
        if (one["precision"], one["link_rate"], one["batch"]) == engine
    ]
    link = active_s = None
    if sessions:
        link = float(np.median([one["link_bytes_per_s"] for one in sessions]))
        memory = float(np.median([one["memory_bytes_per_s"] for one in sessions]))
        if (active := sessions[0]["active_bytes"]) is not None:
            active_s = active / memory
        if link_rate != NO_LINK:
            link = parse_rate(link_rate)
    least = {line["budget"]: line for line in lines if line["mode"] == "bound"}
    order = {name: i for i, name in enumerate(records.asked["policies"])}
    others = _told_once([line for line in lines if line["mode"] != "bound"])
    budgets = {budget: i for i, budget in enumerate(records.asked["budgets"])}
    others.sort(key=lambda line: (budgets[line["budget"]], order[line["policy"]], line["mode"]))
    return Panel(title, others, least, link, active_s)


def _told_once(lines: Sequence[Line]) -> list[Line]:
    """The lines without simulated ones whose counts a measured one has."""
    measured = {
        tuple(line.get(name) for name in (*PLACE[1:], *COUNTS))
        for line in lines
        if line["mode"] == "measured"
    }
    return [
        line
        for line in lines
        if line["mode"] != "simulated"
        or tuple(line.get(name) for name in (*PLACE[1:], *COUNTS)) not in measured
    ]


def _mean(lines: Sequence[Line]) -> Line:
    """Lines of several seeds as one: means of numbers, with `seeds` and the range of misses."""
    whole = [line for line in lines if line["runs"]] or lines
    found = dict(whole[0])
    for name, value in whole[0].items():
        values = [line.get(name) for line in whole]
        if isinstance(value, bool):
            found[name] = all(values) if name == "no_choice" else any(values)
        elif isinstance(value, int | float) and name not in PLACE:
            found[name] = float(np.mean([v for v in values if v is not None]))
    errors = [line["error"] for line in lines if line["error"]]
    found["error"], found["seeds"] = (errors[0] if errors else None), len(lines)
    misses = [line["decode_misses"] for line in whole if "decode_misses" in line]
    found["misses_range"] = (min(misses), max(misses)) if misses else None
    return found


_FOLDERS = re.compile(r"[^\s+]*/")


def labels(lines: Sequence[Line]) -> dict[int, str]:
    """Place of each line → its policy, with mode and driver where the lines differ in them."""
    several = [key for key in ("mode", "driver") if len({line[key] for line in lines}) > 1]
    return {
        i: ", ".join([_FOLDERS.sub("", line["policy"]), *(str(line[key]) for key in several)])
        for i, line in enumerate(lines)
    }


HEADINGS = (
    *(
        "policy",
        "budget",
        "",
        "misses/step",
        "+ ahead",
        "MIN",
        "hits",
        "ahead: used/moved",
        "recall",
    ),
    *("bytes/step", "TPOT p50 ms", "× baseline", "p99 ms", "TTFT ms", "tokens/s"),
)


def table_rows(panel: Panel) -> list[list[str]]:
    """Cells of the panel's table, under HEADINGS, as text."""
    names = labels(panel.lines)
    return [_row(panel, line, names[i]) for i, line in enumerate(panel.lines)]


def _row(panel: Panel, line: Line, name: str) -> list[str]:
    if not line["runs"]:
        return [name, line["budget"], f"failed: {line['error']}", *[""] * (len(HEADINGS) - 3)]
    steps = line["decode_steps"] or 1
    least = panel.least.get(line["budget"])
    needed = line["decode_hits"] + line["decode_misses"]
    moved, used = line.get("ahead_done", 0), line.get("ahead_used", 0)
    missed = line["prefill_misses"] + line["decode_misses"]
    marks = ["∅"] if line.get("no_choice") else []
    marks += ["counts differ"] if line.get("counts_differ") else []
    marks += [f"{line['error']}"] if line["error"] else []
    low, high = line["misses_range"]
    spread = f" ({low / steps:.2f}–{high / steps:.2f})" if line["seeds"] > 1 else ""
    return [
        name,
        line["budget"],
        ", ".join(marks),
        f"{line['decode_misses'] / steps:.2f}{spread}",
        f"{(line['decode_misses'] + line['decode_ahead']) / steps:.2f}",
        "–" if least is None else f"{least['decode_misses'] / steps:.2f}",
        f"{line['decode_hits'] / needed:.1%}" if needed else "–",
        f"{used:.0f}/{moved:.0f}" if moved else "–",
        f"{used / (used + missed):.2f}" if moved and used + missed else "–",
        format_bytes(round(line["decode_bytes"] / steps)),
        _ms(line, "tpot_p50_s"),
        _figure(line, "tpot_p50_s_ratio", 1, 3),
        _ms(line, "tpot_p99_s", interval=False),
        _ms(line, "ttft_s"),
        _figure(line, "tokens_per_s", 1, _rate_digits(line), interval=False),
    ]


def _rate_digits(line: Line) -> int:
    return 0 if (line.get("tokens_per_s") or 0) >= 100 else 1


def _ms(line: Line, name: str, *, interval: bool = True) -> str:
    return _figure(line, name, 1e3, 2, interval=interval)


def _figure(line: Line, name: str, scale: float, digits: int, *, interval: bool = True) -> str:
    if (value := line.get(name)) is None:
        return "–"
    found = f"{value * scale:.{digits}f}"
    if interval and line.get(f"{name}_low") is not None:
        low, high = line[f"{name}_low"] * scale, line[f"{name}_high"] * scale
        found += f" [{low:.{digits}f}–{high:.{digits}f}]"
    return found


def miss_series(panel: Panel) -> list[Series]:
    """Misses of a decode step against the budget's MiB, with MIN. Of several modes the first that
    the panel has, since their counts are the same ones."""
    lines = _one_mode(panel)
    found = _series(lines, lambda line: line["decode_misses"] / line["decode_steps"])
    steps = next((line["decode_steps"] for line in lines if line["decode_steps"]), 1)
    least = [
        (line["expert_bytes"] / 2**20, line["decode_misses"] / steps)
        for line in panel.least.values()
    ]
    pool = [
        (line["expert_bytes"] / 2**20, line["pool_misses"] / steps)
        for line in panel.least.values()
        if "pool_misses" in line  # the first grids' bounds have none
    ]
    if least:
        found.append(Series("MIN, ahead of need too", sorted(least), True))
    if pool:
        found.append(Series("MIN, one pool", sorted(pool), True))
    return found


def time_series(panel: Panel) -> list[Series]:
    """Milliseconds of an output token against the budget's MiB, with what the link needs for MIN's
    bytes and the device's memory for the experts that are computed with."""
    timed = [line for line in panel.lines if line.get("tpot_p50_s") is not None]
    found = _series(timed, lambda line: line["tpot_p50_s"] * 1e3)
    if not found:
        return []
    xs = sorted({x for series in found for x, _ in series.points})
    steps = timed[0]["decode_steps"] or 1
    if panel.link and panel.least:
        by_link = [
            (line["expert_bytes"] / 2**20, line["decode_bytes"] / steps / panel.link * 1e3)
            for line in panel.least.values()
        ]
        found.append(Series("MIN over the link", sorted(by_link), True))
    if panel.active_s:
        found.append(Series("memory", [(x, panel.active_s * 1e3) for x in xs], True))
    return found


def moved_series(panel: Panel) -> list[Series]:
    """Milliseconds of an output token against KiB that a decode step moves, with the link."""
    timed = [line for line in panel.lines if line.get("tpot_p50_s") is not None]
    names = labels(timed)
    points: dict[str, list[tuple[float, float]]] = {}
    for i, line in enumerate(timed):
        x = line["decode_bytes"] / (line["decode_steps"] or 1) / 1024
        points.setdefault(names[i], []).append((x, line["tpot_p50_s"] * 1e3))
    found = [Series(name, sorted(found)) for name, found in points.items()]
    xs = [x for series in found for x, _ in series.points if x > 0]
    if xs and panel.link:
        rate = panel.link
        ends = [(x, x * 1024 / rate * 1e3) for x in (min(xs), max(xs))]
        found.append(Series("link", ends, True))
    return found


def _one_mode(panel: Panel) -> list[Line]:
    whole = [line for line in panel.lines if line["runs"] and line["decode_steps"]]
    modes = [
        m for m in ("measured", "simulated", "predicted") if any(m == x["mode"] for x in whole)
    ]
    return [line for line in whole if modes and line["mode"] == modes[0]]


def _series(lines: Sequence[Line], value: Any) -> list[Series]:
    names, points = labels(lines), {}
    for i, line in enumerate(lines):
        points.setdefault(names[i], []).append((line["expert_bytes"] / 2**20, value(line)))
    return [Series(name, sorted(found)) for name, found in points.items()]
