"""The tables of a report: rows of text, from which page, Markdown, CSV and terminal are made."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.memory.budget import format_bytes
from moejax.evaluate.experiments.definition import NO_LINK
from moejax.evaluate.experiments.quality import compare_quality
from moejax.evaluate.experiments.records import COUNTS, PLACE, Line, Records
from moejax.sizes import parse_rate

NONE = "–"

PANEL = ("link_rate", "batch", "prompt_tokens", "text")
"""What one table and one row of plots is of."""

COUNTED = ("measured", "simulated", "predicted")


class Table(NamedTuple):
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """The cells of one text, batch, link and context."""

    title: str
    lines: Sequence[Line]
    least: Mapping[tuple[str, str], Line]
    """Precision and budget → MIN, where it is claimed."""
    link: float | None
    """Bytes a second of the link; None: not measured."""
    active_s: float | None
    """Seconds in which the device's memory gives the experts that a decode step computes with."""

    def bound_of(self, line: Line) -> Line | None:
        """MIN with as many cells."""
        return self.least.get((line["precision"], line["budget"]))


def tables_of(records: Records) -> Iterator[Table]:
    """All that the records have something for, without the columns that have nothing."""
    shown = panels(records)
    found = [panel_table(panel) for panel in shown]
    found += [
        _conversations(records),
        _quality(records),
        prediction_table(mean_over_seeds(records)),
        _beside_baseline(records.asked["baseline"], shown),
    ]
    for table in found:
        if table.rows:
            columns = list(zip(table.headings, *table.rows, strict=True))
            kept = [column for column in columns if {*column[1:]} - {NONE, ""}]
            headings, *rows = zip(*kept, strict=True)
            yield Table(table.title, headings, rows)


def mean_over_seeds(records: Records) -> list[Line]:
    """The summary with several seeds of a place as one line: means of numbers, with `seeds` and the
    range of misses."""
    by_place: dict[tuple[Any, ...], list[Line]] = {}
    for line in records.summary():
        key = tuple(line[name] for name in PLACE if name != "seed")
        by_place.setdefault(key, []).append(line)
    return [_mean(lines) for lines in by_place.values()]


def _mean(lines: Sequence[Line]) -> Line:
    whole = [line for line in lines if line["runs"]] or lines
    found = dict(whole[0])
    for name, value in whole[0].items():
        values = [line.get(name) for line in whole]
        if isinstance(value, bool):
            found[name] = all(values) if name == "no_choice" else any(values)
        elif isinstance(value, int | float) and name not in PLACE:
            found[name] = float(np.mean([v for v in values if v is not None]))
    found["error"] = next((line["error"] for line in lines if line["error"]), None)
    found["seeds"] = len(lines)
    misses = [line["decode_misses"] for line in whole if line.get("decode_misses") is not None]
    found["misses_range"] = (min(misses), max(misses)) if misses else None
    return found


# ---- policies and budgets of a place


def panels(records: Records) -> list[Panel]:
    """The panels of a report, in the grid's order."""
    places: dict[tuple[Any, ...], list[Line]] = {}
    for line in mean_over_seeds(records):
        if line["mode"] in (*COUNTED, "bound"):
            places.setdefault(tuple(line[name] for name in PANEL), []).append(line)
    return [_panel(records, place, lines) for place, lines in places.items()]


def _panel(records: Records, place: tuple[Any, ...], lines: Sequence[Line]) -> Panel:
    link_rate, batch, prompt, text = place
    asked = records.asked
    title = f"{text} · batch {batch} · {prompt}+{asked['output_tokens']} tokens"
    title += f" · link {link_rate}" if link_rate != NO_LINK else ""
    sessions = [s for s in records.sessions if (s["link_rate"], s["batch"]) == (link_rate, batch)]
    link = None if link_rate == NO_LINK else parse_rate(link_rate)
    active_s = None
    if sessions:
        link = link or float(np.median([one["link_bytes_per_s"] for one in sessions]))
        memory = float(np.median([one["memory_bytes_per_s"] for one in sessions]))
        active = sessions[0].get("active_bytes")
        active_s = active / memory if active else None
    least = {
        (line["precision"], line["budget"]): line
        for line in lines
        if line["mode"] == "bound" and line["decode_misses"] is not None
    }
    known = {
        tuple(line.get(name) for name in (*PLACE[1:], *COUNTS))
        for line in lines
        if line["mode"] == "measured"
    }
    shown = [  # a simulated line whose counts a measured one has says nothing new
        line
        for line in lines
        if line["mode"] in ("measured", "predicted")
        or (
            line["mode"] == "simulated"
            and tuple(line.get(name) for name in (*PLACE[1:], *COUNTS)) not in known
        )
    ]
    axes = [asked.get(name) or [NO_LINK] for name in ("budgets", "precision", "policies")]
    orders = [{name: i for i, name in enumerate(axis)} for axis in axes]

    def place_of(line: Line) -> tuple[Any, ...]:
        names = line["budget"], line["precision"], line["policy"]
        return *(order.get(n, -1) for order, n in zip(orders, names, strict=True)), line["mode"]

    return Panel(title, sorted(shown, key=place_of), least, link, active_s)


_FOLDERS = re.compile(r"[^\s+]*/")


def labels(lines: Sequence[Line]) -> list[str]:
    """The policy of each line, with precision, mode and driver where the lines differ in them."""
    keys = [k for k in ("precision", "mode", "driver") if len({line[k] for line in lines}) > 1]
    return [
        ", ".join([_FOLDERS.sub("", line["policy"]), *(str(line[key]) for key in keys)])
        for line in lines
    ]


def moved(line: Line) -> float:
    """Experts of the decode steps that were moved, ahead of need too."""
    return line["decode_misses"] + line.get("decode_ahead", 0)


def panel_table(panel: Panel) -> Table:
    """Counts of decode steps and medians of times, a row for each arm and budget."""
    headings = ("policy", "budget", "", *COLUMNS)
    rows = []
    for name, line in zip(labels(panel.lines), panel.lines, strict=True):
        if not line["runs"]:
            said = f"failed: {line['error']}"
            rows.append([name, line["budget"], said, *[""] * len(COLUMNS)])
            continue
        marks = ["∅"] if line.get("no_choice") else []
        marks += ["counts differ"] if line.get("counts_differ") else []
        marks += [line["error"]] if line["error"] else []
        values = [column(panel, line) for column in COLUMNS.values()]
        rows.append([name, line["budget"], ", ".join(marks), *values])
    return Table(panel.title, headings, rows)


def _misses(panel: Panel, line: Line) -> str:
    steps, (low, high) = line["decode_steps"] or 1, line["misses_range"]
    spread = f" ({low / steps:.2f}–{high / steps:.2f})" if line["seeds"] > 1 else ""
    return f"{line['decode_misses'] / steps:.2f}{spread}"


def _least(panel: Panel, line: Line) -> str:
    bound = panel.bound_of(line)
    return f"{bound['decode_misses'] / (line['decode_steps'] or 1):.2f}" if bound else NONE


def _hits(panel: Panel, line: Line) -> str:
    needed = line["decode_hits"] + line["decode_misses"]
    return f"{line['decode_hits'] / needed:.1%}" if needed else NONE


def _recall(panel: Panel, line: Line) -> str:
    needed = line["ahead_used"] + line["prefill_misses"] + line["decode_misses"]
    return f"{line['ahead_used'] / needed:.2f}" if line["ahead_done"] and needed else NONE


def _versions(panel: Panel, line: Line) -> str:
    return f"{line['hi']:.0f}/{line['lo']:.0f}" if line.get("hi") is not None else NONE


def _figure(name: str, scale: float = 1, digits: int = 2) -> Callable[[Panel, Line], str]:
    """A column with a median and its interval."""

    def write(panel: Panel, line: Line) -> str:
        if line.get(name) is None:
            return NONE
        found = f"{line[name] * scale:.{digits}f}"
        if line.get(f"{name}_low") is not None:
            low, high = line[f"{name}_low"] * scale, line[f"{name}_high"] * scale
            found += f" [{low:.{digits}f}–{high:.{digits}f}]"
        return found

    return write


COLUMNS: Mapping[str, Callable[[Panel, Line], str]] = {
    "MiB": lambda panel, line: f"{line['expert_bytes'] / 2**20:.2f}",
    "high/low": _versions,
    "misses/step": _misses,
    "+ ahead": lambda panel, line: f"{moved(line) / (line['decode_steps'] or 1):.2f}",
    "MIN": _least,
    "hits": _hits,
    "ahead: used/moved": lambda panel, line: (
        f"{line['ahead_used']:.0f}/{line['ahead_done']:.0f}" if line["ahead_done"] else NONE
    ),
    "recall": _recall,
    "bytes/step": lambda panel, line: format_bytes(
        round(line["decode_bytes"] / (line["decode_steps"] or 1))
    ),
    "TPOT p50 ms": _figure("tpot_p50_s", 1e3),
    "× baseline": _figure("tpot_p50_s_ratio", 1, 3),
    "p99 ms": _figure("tpot_p99_s", 1e3),
    "TTFT ms": _figure("ttft_s", 1e3),
    "tokens/s": _figure("tokens_per_s", 1, 1),
}
"""Heading → what a line of a panel says there."""


# ---- conversations


def _conversations(records: Records) -> Table:
    """Splits that are held first, then policies that move the line; means over seeds, and each
    arm beside the split that is best on all other seeds, paired by seed."""
    title = f"Conversations, one memory of {records.asked.get('memory')} for experts and KV, priced"
    headings = ("conversations", "batch", "policy", "begins with", "tokens/s", "TTFT ms")
    headings += ("/ best held, other seeds", "range", "misses", "KV pages moved")
    headings += ("cells at the end", "unserved")
    places: dict[tuple[Any, ...], dict[tuple[str, str], dict[int, Line]]] = {}
    for row in sorted(records.of_mode("priced"), key=lambda row: row["moves_memory"]):
        arms = places.setdefault((row["text"], row["batch"]), {})
        arms.setdefault((row["policy"], row["budget"]), {})[row["seed"]] = row
    rows = []
    for (text, batch), arms in places.items():
        seeds = sorted(set.intersection(*({*runs} for runs in arms.values())))
        each = {arm: [runs[seed] for seed in seeds] for arm, runs in arms.items()}
        held = [runs for runs in each.values() if runs and not runs[0]["moves_memory"]]
        rates = np.array([[row["tokens_per_s"] for row in runs] for runs in held])
        for (policy, budget), runs in each.items():
            mine = np.array([row["tokens_per_s"] for row in runs])
            beside = [NONE, NONE]
            if held and len(seeds) > 1:
                others = [np.delete(rates, i, 1).mean(1).argmax() for i in range(len(seeds))]
                ratio = mine / rates[others, np.arange(len(seeds))]
                beside = [f"{np.exp(np.log(ratio).mean()):.3f}", _range(ratio.tolist(), 3)]
            mean = {n: np.mean([row[n] for row in runs]) for n in runs[0] if n in _PRICED}
            unserved = f"{sum(r['unserved'] for r in runs)}/{sum(r['turns'] for r in runs)}"
            row = [text, str(batch), policy, budget, f"{mine.mean():.1f}"]
            row += [f"{mean['ttft_s'] * 1e3:.1f}", *beside]
            row.append(f"{mean['prefill_misses'] + mean['decode_misses']:.0f}")
            row += [f"{mean['kv_pages_moved']:.0f}", f"{mean['cells_end']:.1f}", unserved]
            rows.append(row)
    return Table(title, headings, rows)


_PRICED = ("ttft_s", "prefill_misses", "decode_misses", "kv_pages_moved", "cells_end")


# ---- quality


def _quality(records: Records) -> Table:
    """A row for each text and precision: its perplexity, and by how much that is above the first
    precision's, with the 95% interval over pairs of windows; then for all texts together."""
    first = records.asked.get("precision", ["dense"])[0]
    headings = ("precision", "text", "perplexity", f"above {first}", "tokens", "budget")
    headings += ("high/low", "promoted/demoted")
    texts = [(text, [text]) for text in dict.fromkeys(line["text"] for line in records.quality)]
    texts += [("all texts", [text for text, _ in texts])] if len(texts) > 1 else []
    rows = []
    for name, of in texts:
        arms: dict[tuple[str, str | None], list[Line]] = {}
        for line in records.quality:
            if line["text"] in of:
                arms.setdefault((line["precision"], line["budget"]), []).append(line)
        whole = [_together(name, found) for found in arms.values() if len(found) == len(of)]
        for line in whole:
            alike = [
                one
                for one in whole
                # The first precision of two versions has a line for each budget.
                if one["precision"] == first and one["budget"] in (None, line["budget"])
            ]
            above = NONE if not alike or line is alike[0] else _above(line, alike[0])
            changes = line.get("promotions")
            row = [line["precision"], name, f"{line['perplexity']:.4f}", above]
            row += [f"{line['tokens']}", line["budget"] or "any", COLUMNS["high/low"](None, line)]  # type: ignore[arg-type]
            rows.append([*row, NONE if changes is None else f"{changes}/{line['demotions']}"])
    return Table("Quality", headings, rows)


def _together(name: str, lines: Sequence[Line]) -> Line:
    """Lines of several texts as one; what transitions came to is that of the last, which counts
    from the first on."""
    bits = [one for line in lines for one in line["window_bits"]]
    windows = [one for line in lines for one in line["window_tokens"]]
    found = {"text": name, "window_bits": bits, "window_tokens": windows, "tokens": sum(windows)}
    return {**lines[-1], **found, "perplexity": 2 ** (sum(bits) / sum(windows))}


def _above(line: Line, first: Line) -> str:
    found = compare_quality(line, first)
    said = f"{2**found.difference - 1:+.2%}"
    if found.low is not None and found.high is not None:
        said += f" [{2**found.low - 1:+.2%}, {2**found.high - 1:+.2%}]"
    return said


# ---- predictions


class Pair(NamedTuple):
    """A cell that was both measured and predicted."""

    measured: Line
    predicted: Line


TIMES: Mapping[str, Callable[[Line], float]] = {
    "step": lambda line: line["decode_s"] / line["decode_steps"],
    "p50": lambda line: line["tpot_p50_s"],
    "p99": lambda line: line["tpot_p99_s"],
    "first token": lambda line: line["ttft_s"],
    "run": lambda line: line["prefill_s"] + line["decode_s"],
}
"""What is both measured and predicted; step: the mean decode step."""


def prediction_table(lines: Sequence[Line]) -> Table:
    """Errors (predicted − measured) / measured for each link rate and batch, then for all. τ: of
    policies, budgets and links in one batch, prompt and text. stall: the predicted time that moving
    experts adds; bound: what of it no overlap of link and computing could hide."""
    found: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        if line["runs"] and line.get("decode_s") is not None:
            place = tuple(str(line[name]) for name in PLACE if name not in ("mode", "seed"))
            found.setdefault(place, {})[line["mode"]] = line
    pairs = [Pair(x["measured"], x["predicted"]) for x in found.values() if len(x) == 2]
    places: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        where = pair.measured["link_rate"], str(pair.measured["batch"])
        places.setdefault(where, []).append(pair)
    if len(places) > 1:
        places["all", "all"] = pairs
    rows = []
    for where, chosen in places.items():
        row = [*where, str(len(chosen)), f"{np.median(np.abs(errors(chosen, 'step'))):.1%}"]
        for name in TIMES:
            off = errors(chosen, name)
            row.append(f"{np.mean(np.abs(off)):.1%} ({off[np.argmax(np.abs(off))]:+.1%})")
        tau, count = kendall(chosen)
        row.append(f"{tau:.2f} of {count}" if count else NONE)
        for name in ("stall_share", "stall_bound_share"):
            row.append(f"{np.mean([pair.predicted[name] for pair in chosen]):.0%}")
        rows.append(row)
    title = "Predicted beside measured: mean error (worst), Kendall's τ of the mean steps' order"
    headings = ("link", "batch", "places", "step, median", *TIMES, "τ", "stall", "bound")
    return Table(title, headings, rows)


def errors(pairs: Sequence[Pair], name: str) -> np.ndarray:
    """float64[len(pairs)]: (predicted − measured) / measured of one of TIMES."""
    times = np.array([[TIMES[name](line) for line in pair] for pair in pairs])
    return times[:, 1] / times[:, 0] - 1


def kendall(pairs: Sequence[Pair]) -> tuple[float, int]:
    """(Kendall's tau-a of mean decode steps, pairs of cells) within each precision, batch, prompt
    and text. nan without any."""
    score = count = 0
    for one, other in itertools.combinations(pairs, 2):
        names = "precision", "batch", "prompt_tokens", "text"
        if any(one.measured[name] != other.measured[name] for name in names):
            continue
        measured, predicted = (
            np.sign(TIMES["step"](a) - TIMES["step"](b)) for a, b in zip(one, other, strict=True)
        )
        score, count = score + int(measured * predicted), count + 1
    return (score / count if count else float("nan")), count


# ---- all places


def _beside_baseline(baseline: str, shown: Sequence[Panel]) -> Table:
    """Each policy beside the baseline, over decode steps. moved: misses and what came ahead of
    need. A tie for the least counts for everybody; an arm that knows the run is never the least."""
    places: dict[tuple[Any, ...], dict[str, Line]] = {}
    bounds: dict[tuple[Any, ...], Line] = {}
    for panel in shown:
        for line in panel.lines:
            # Where a grid has several modes the first stands for all: their counts are alike.
            if (
                line["runs"]
                and line["mode"] != "predicted"
                and line["cells_least"] < line["experts"]
            ):
                where = panel.title, line["precision"], line["budget"]
                places.setdefault(where, {}).setdefault(line["policy"], line)
                if bound := panel.bound_of(line):
                    bounds[where] = bound
    names = list(dict.fromkeys(name for place in places.values() for name in place))
    told = ("/ its", "less in", "more in", "the least in")
    headings = ("policy", *(f"{what} {one}" for what in ("moved", "misses") for one in told))
    title = f"Beside {baseline}, over all places below full residency"
    rows = []
    for name in names if len(places) > 1 and len(names) > 1 else ():
        row = [name]
        for count in (moved, lambda line: line["decode_misses"]):
            both = [p for p in places.values() if name in p and baseline in p]
            pairs = [(count(p[name]), count(p[baseline])) for p in both]
            least = [
                min(count(line) for n, line in p.items() if not n.startswith("oracle"))
                for p in both
            ]
            row += [
                _range([mine / its for mine, its in pairs if its]),
                str(sum(mine < its for mine, its in pairs)),
                str(sum(mine > its for mine, its in pairs)),
                str(sum(mine == low for (mine, _), low in zip(pairs, least, strict=True))),
            ]
        over = [
            moved(place[name]) / bound["decode_misses"]
            for where, place in places.items()
            if name in place and (bound := bounds.get(where)) and bound["decode_misses"]
        ]
        rows.append([*row, _range(over)])
    return Table(title, (*headings, "moved / MIN"), rows)


def _range(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}" if values else NONE
