"""Makes the tables of a report: rows of text, from which page, Markdown, CSV and terminal
are made."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.memory.budget import format_bytes
from host_offload.traces.generators import KINDS
from moejax.evaluate.comparison import Units, compare_units, over_seeds
from moejax.evaluate.experiments.definition import NO_LINK
from moejax.evaluate.experiments.records import COUNTS, PLACE, Line, Records
from moejax.sizes import parse_rate

NONE = "–"

PANEL = ("link_rate", "batch", "prompt_tokens", "text")
"""The columns in which cells of one table, and of its plots, agree."""


class Table(NamedTuple):
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """The cells of one text, batch, link and context."""

    title: str
    lines: Sequence[Line]
    """Lines of the summary, with several seeds as one. Each has, as `least`, the line of MIN with
    as many cells."""
    bounds: Sequence[Line]
    """The lines of MIN, for each budget with a claimed bound."""
    link: float | None
    """Bytes a second of the link; None if not measured."""


def tables_of(records: Records) -> Iterator[Table]:
    """Yields the tables that have rows, without columns in which no row has a value."""
    shown = panels(records)
    found = [panel_table(panel) for panel in shown]
    found += [_quality(records), prediction_table(mean_over_seeds(records))]
    found += [_beside_baseline(records.asked["baseline"], shown), _by_seeds(records)]
    for table in found:
        if table.rows:
            columns = list(zip(table.headings, *table.rows, strict=True))
            headings, *rows = zip(*(c for c in columns if {*c[1:]} - {NONE, ""}), strict=True)
            yield Table(table.title, headings, rows)


def mean_over_seeds(records: Records) -> list[Line]:
    """Returns the summary, with several seeds of a place as one line: means of numbers, with
    `seeds` and the ranges of misses and of the share of hits."""
    by_place: dict[tuple[Any, ...], list[Line]] = {}
    for line in records.summary():
        key = tuple(line[name] for name in PLACE if name != "seed")
        by_place.setdefault(key, []).append(line)
    return [_mean(lines) for lines in by_place.values()]


def _mean(lines: Sequence[Line]) -> Line:
    whole = [line for line in lines if line["runs"]] or lines
    found = dict(whole[0])
    for name, value in whole[0].items():
        values = [line[name] for line in whole if line.get(name) is not None]
        if isinstance(value, bool):
            found[name] = any(values)
        elif isinstance(value, int | float) and name not in PLACE:
            found[name] = float(np.mean(values))
    found["error"] = next((line["error"] for line in lines if line["error"]), None)
    misses = [line["decode_misses"] for line in whole if line.get("decode_misses") is not None]
    hits = [share for line in whole if (share := hit_share(line)) is not None]
    return {
        **found,
        "seeds": len(lines),
        "misses_range": (min(misses), max(misses)) if misses else None,
        "hits_range": (min(hits), max(hits)) if hits else None,
    }


# ---- policies and budgets of a place


def panels(records: Records) -> list[Panel]:
    """Returns the panels of a report, in the grid's order."""
    places: dict[tuple[Any, ...], list[Line]] = {}
    for line in mean_over_seeds(records):
        places.setdefault(tuple(line[name] for name in PANEL), []).append(line)
    return [_panel(records, place, lines) for place, lines in places.items()]


def _panel(records: Records, place: tuple[Any, ...], lines: Sequence[Line]) -> Panel:
    link_rate, batch, prompt, text = place
    asked = records.asked
    title = f"{text} · batch {batch} · {prompt}+{asked['output_tokens']} tokens"
    if text in (asked.get("routing") or ()) and text.partition(",")[0] not in KINDS:
        title = text  # a trace has sequences and tokens of its own
    if link_rate != NO_LINK:
        title, link = f"{title} · link {link_rate}", parse_rate(link_rate)
    else:
        rates = [s["link_bytes_per_s"] for s in records.sessions if s["batch"] == batch]
        link = float(np.median(rates)) if rates else None

    def identity(line: Line) -> tuple[Any, ...]:
        return tuple(line.get(name) for name in (*PLACE[1:], *COUNTS))

    def order(line: Line) -> tuple[Any, ...]:
        budget, precision = asked["budgets"].index(line["budget"]), line["precision"]
        places = (
            budget,
            asked["precision"].index(precision),
            asked["policies"].index(line["policy"]),
        )
        return line.get("moves_memory", False), *places, line["mode"]

    bounds = {
        (line["precision"], line["budget"]): line
        for line in lines
        if line["mode"] == "bound" and line["decode_misses"] is not None
    }
    # A simulated line with the counts of a measured line adds nothing.
    known = {identity(line) for line in lines if line["mode"] == "measured"}
    shown = [
        {**line, "least": bounds.get((line["precision"], line["budget"]))}
        for line in lines
        if line["mode"] != "bound" and (line["mode"] != "simulated" or identity(line) not in known)
    ]
    if shown and shown[0]["mode"] == "priced":
        shown = _compare_with_held(records, shown)
    return Panel(title, sorted(shown, key=order), [*bounds.values()], link)


def _compare_with_held(records: Records, lines: Sequence[Line]) -> list[Line]:
    """Returns lines of conversations with `held_ratios`: for each seed, tokens a second over those
    with a fixed split of the memory, the one that is best on all other seeds."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    held = {(line["policy"], line["budget"]) for line in lines if not line.get("moves_memory")}
    for row in records.of_mode("priced"):
        if all(row[name] == lines[0][name] for name in PANEL):
            arm = rates.setdefault((row["policy"], row["budget"]), {})
            arm[row["seed"]] = row["tokens_per_s"]
    seeds = sorted(set.intersection(*({*found} for found in rates.values())))
    base = np.array([[rates[arm][seed] for seed in seeds] for arm in rates if arm in held])
    if not len(base) or len(seeds) < 2:
        return [*lines]
    best = [np.delete(base, i, 1).mean(1).argmax() for i in range(len(seeds))]
    found = []
    for line in lines:
        mine = rates.get((line["policy"], line["budget"]), {})
        ratios = [mine[s] / base[best[i], i] for i, s in enumerate(seeds)] if mine else None
        found.append({**line, "held_ratios": ratios})
    return found


_FOLDERS = re.compile(r"[^\s+=]*/")


def short_name(policy: str) -> str:
    """Returns a policy's name without the folders of files."""
    return _FOLDERS.sub("", policy)


def labels(lines: Sequence[Line]) -> list[str]:
    """Returns the policy of each line, with precision, mode and driver if the lines
    differ in them."""
    keys = [k for k in ("precision", "mode", "driver") if len({line[k] for line in lines}) > 1]
    return [
        ", ".join([short_name(line["policy"]), *(str(line[key]) for key in keys)]) for line in lines
    ]


def panel_table(panel: Panel) -> Table:
    """Makes the table of a panel: counts of decode steps and medians of times, a row for each arm
    and budget."""
    rows = []
    for name, line in zip(labels(panel.lines), panel.lines, strict=True):
        said = "counts differ" if line.get("counts_differ") else ""
        said = f"failed: {line['error']}" if line["error"] else line.get("refusal") or said
        whole = {**line, "steps": line.get("decode_steps") or 1}
        values = (
            [column(whole) for column in COLUMNS.values()] if line["runs"] else [""] * len(COLUMNS)
        )
        rows.append([name, line["budget"], said, *values])
    return Table(panel.title, ("policy", "budget", "", *COLUMNS), rows)


def count_moved(line: Line) -> float:
    """Returns the experts that decode steps moved, including those moved ahead of need."""
    return line["decode_misses"] + line["decode_ahead"]


def _misses(line: Line) -> str:
    steps, (low, high) = line["steps"], line["misses_range"]
    spread = f" ({low / steps:.2f}–{high / steps:.2f})" if line["seeds"] > 1 else ""
    return f"{line['decode_misses'] / steps:.2f}{spread}"


def hit_share(line: Line) -> float | None:
    """Returns the share of decode steps' needed experts that were there; None without any."""
    if line.get("decode_hits") is None:
        return None
    needed = line["decode_hits"] + line["decode_misses"]
    return line["decode_hits"] / needed if needed else None


def _hits(line: Line) -> str:
    if (share := hit_share(line)) is None:
        return NONE
    low, high = line["hits_range"] or (share, share)
    return f"{share:.1%}" + (f" ({low:.1%}–{high:.1%})" if line["seeds"] > 1 else "")


def _recall(line: Line) -> str:
    needed = line["ahead_used"] + line["prefill_misses"] + line["decode_misses"]
    return f"{line['ahead_used'] / needed:.2f}" if line["ahead_done"] and needed else NONE


def _median(name: str, scale: float = 1, digits: int = 2) -> Callable[[Line], str]:
    """Returns a column with a median and its interval."""

    def write(line: Line) -> str:
        if line.get(name) is None:
            return NONE
        ends = [line[end] * scale for end in (f"{name}_low", f"{name}_high") if line.get(end)]
        interval = f" [{ends[0]:.{digits}f}–{ends[1]:.{digits}f}]" if ends else ""
        return f"{line[name] * scale:.{digits}f}{interval}"

    return write


def _versions(line: Line) -> str:
    return f"{line['hi']:.0f}/{line['lo']:.0f}" if line.get("hi") is not None else NONE


COLUMNS: Mapping[str, Callable[[Line], str]] = {
    "MiB": lambda line: f"{line['expert_bytes'] / 2**20:.2f}",
    "high/low": _versions,
    "misses/step": _misses,
    "+ ahead": lambda line: (
        f"{count_moved(line) / line['steps']:.2f}" if line["ahead_done"] else NONE
    ),
    "MIN": lambda line: (
        f"{line['least']['decode_misses'] / line['steps']:.2f}" if line["least"] else NONE
    ),
    "hits": _hits,
    "ahead: used/moved": lambda line: (
        f"{line['ahead_used']:.0f}/{line['ahead_done']:.0f}" if line["ahead_done"] else NONE
    ),
    "recall": _recall,
    "bytes/step": lambda line: format_bytes(round(line["decode_bytes"] / line["steps"])),
    "TPOT p50 ms": _median("tpot_p50_s", 1e3),
    "× baseline": lambda line: (
        ("~ " if line.get("ratio_apart") else "") + _median("tpot_p50_s_ratio", 1, 3)(line)
    ),
    "policy ms/step": lambda line: (
        NONE
        if line.get("policy_s") is None
        else _median("policy_s", 1e3)(line)
        + (  # of conversations nobody knows the time of decoding alone
            f", {line['policy_s'] * line['steps'] / line['decode_s']:.0%}"
            if line.get("decode_s")
            else ""
        )
    ),
    "p99 ms": _median("tpot_p99_s", 1e3),
    "TTFT ms": _median("ttft_s", 1e3),
    "turn ms": _median("turn_s", 1e3),
    "tokens/s": _median("tokens_per_s", 1, 1),
    "/ best held": lambda line: (
        f"{np.exp(np.log(line['held_ratios']).mean()):.3f} ({_range(line['held_ratios'], 3)})"
        if line.get("held_ratios")
        else NONE
    ),
    "KV pages moved": _median("kv_pages_moved", 1, 0),
    "cells at the end": _median("cells_end", 1, 1),
    "unserved": _median("unserved", 1, 1),
}
"""What a line of a panel has under each heading."""


# ---- quality


def _quality(records: Records) -> Table:
    """Makes the table of quality, with a row for each text and precision, and for each policy that
    changes outputs: its perplexity, and the difference to the first precision's with the 95%
    interval over pairs of windows; then for all texts together."""
    first = records.asked["precision"][0]
    texts: dict[str, list[Line]] = {}
    for record in records.of_mode("quality"):
        parts: list[Line] = [*record["texts"]]
        if len(parts) > 1:
            names = "window_bits", "window_tokens"
            whole = {name: [x for text in parts for x in text[name]] for name in names}
            tokens = sum(whole["window_tokens"])
            perplexity = 2 ** (sum(whole["window_bits"]) / tokens)
            said = {"text": "all texts", "tokens": tokens, "perplexity": perplexity}
            parts.append({**parts[-1], **whole, **said})
        for text in parts:
            line = {**text, **{name: record[name] for name in ("precision", "budget", "policy")}}
            texts.setdefault(line["text"], []).append(line)
    rows = []
    for lines in texts.values():
        # The first precision has a record for each budget where it is of two versions.
        plain = [line for line in lines if line["policy"] == "any"]
        bases = {line["budget"]: line for line in plain if line["precision"] == first}
        for line in lines:
            base, above = bases.get(line["budget"], bases.get("any")), NONE
            if base is not None and base is not line:
                found = compare_units(_units(base), _units(line))
                said = (found.difference, found.low or 0.0, found.high or 0.0)
                above = "{:+.2%} [{:+.2%}, {:+.2%}]".format(*(2**bits - 1 for bits in said))
            policy = NONE if line["policy"] == "any" else short_name(line["policy"])
            row = [line["precision"], policy, line["budget"], line["text"]]
            row.append(f"{line['perplexity']:.4f}")
            moves = [line.get(name) for name in ("promotions", "demotions")]
            changed = NONE if None in moves else "/".join(map(str, moves))
            rows.append([*row, above, str(line["tokens"]), _versions(line), changed])
    headings = ("precision", "policy", "budget", "text", "perplexity", f"above {first}", "tokens")
    return Table("Quality", (*headings, "high/low", "promoted/demoted"), rows)


def _units(line: Line) -> Units:
    keys = [str(place) for place in range(len(line["window_bits"]))]
    return Units(line["text"], "bits/token", keys, line["window_bits"], line["window_tokens"])


# ---- predictions


class Pair(NamedTuple):
    """A cell that was both measured and predicted."""

    measured: Line
    predicted: Line


TIMES: Mapping[str, Callable[[Line], float]] = {
    "decode step": lambda line: line["decode_s"] / line["decode_steps"],
    "p99": lambda line: line["tpot_p99_s"],
    "first token": lambda line: line["ttft_s"],
}
"""Times that are both measured and predicted; decode step: the mean."""


def prediction_table(lines: Sequence[Line]) -> Table:
    """Makes the table of errors (predicted − measured) / measured for each link rate and batch. τ
    is over policies, budgets and links in one batch, prompt and text. stall: the predicted time
    that moving experts adds. bound: the part of stall that no overlap of link and computing could
    hide."""
    found: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        if line["runs"] and line["mode"] in ("measured", "predicted"):
            place = tuple(str(line[name]) for name in PLACE if name not in ("mode", "seed"))
            found.setdefault(place, {})[line["mode"]] = line
    places: dict[tuple[str, str], list[Pair]] = {}
    for both in found.values():
        if len(both) == 2:
            pair = Pair(both["measured"], both["predicted"])
            where = pair.measured["link_rate"], str(pair.measured["batch"])
            places.setdefault(where, []).append(pair)
    rows = []
    for where, chosen in places.items():
        row = [*where, str(len(chosen))]
        for name in TIMES:
            off = errors(chosen, name)
            row.append(f"{np.mean(np.abs(off)):.1%} ({off[np.argmax(np.abs(off))]:+.1%})")
        shares = ("stall_share", "stall_bound_share")
        stalls = [np.mean([pair.predicted[name] for pair in chosen]) for name in shares]
        rows.append([*row, f"{kendall(chosen):.2f}", *(f"{stall:.0%}" for stall in stalls)])
    title = "Predicted beside measured: mean error (worst), Kendall's τ of the mean steps' order"
    return Table(title, ("link", "batch", "places", *TIMES, "τ", "stall", "bound"), rows)


def errors(pairs: Sequence[Pair], name: str) -> np.ndarray:
    """Returns (predicted − measured) / measured of one of TIMES, float64[len(pairs)]."""
    times = np.array([[TIMES[name](line) for line in pair] for pair in pairs])
    return times[:, 1] / times[:, 0] - 1


def kendall(pairs: Sequence[Pair]) -> float:
    """Returns Kendall's tau-a of mean decode steps within each precision, batch, prompt and text;
    nan if there is nothing to order."""
    places: dict[tuple[Any, ...], list[tuple[float, ...]]] = {}
    for pair in pairs:
        names = "precision", "batch", "prompt_tokens", "text"
        place = tuple(pair.measured[name] for name in names)
        times = tuple(TIMES["decode step"](line) for line in pair)
        places.setdefault(place, []).append(times)
    signs = [
        np.sign(one[0] - other[0]) * np.sign(one[1] - other[1])
        for times in places.values()
        for one, other in itertools.combinations(times, 2)
    ]
    return float(np.mean(signs)) if signs else float("nan")


# ---- all places


def title_beside(baseline: str) -> str:
    return f"Beside {baseline}, over all places below full residency"


def lines_by_place(shown: Sequence[Panel]) -> dict[tuple[str, str, str], dict[str, Line]]:
    """Returns the lines of all places below full residency by policy: by (panel's title, precision,
    budget). Where a grid has several modes the first stands for all: their counts are alike."""
    places: dict[tuple[str, str, str], dict[str, Line]] = {}
    for panel in shown:
        for line in panel.lines:
            counted = line["runs"] and line["mode"] in ("measured", "predicted", "simulated")
            if counted and line["cells_least"] < line["experts"]:
                where = panel.title, line["precision"], line["budget"]
                places.setdefault(where, {}).setdefault(line["policy"], line)
    return places


def _beside_baseline(baseline: str, shown: Sequence[Panel]) -> Table:
    """Makes the table of each policy beside the baseline, over decode steps. moved: misses and
    experts moved ahead of need."""
    places = lines_by_place(shown)
    names = dict.fromkeys(name for place in places.values() for name in place)
    rows = []
    for name in names if len(places) > 1 and len(names) > 1 else ():
        row = [name]
        for count in (count_moved, lambda line: line["decode_misses"]):
            both = [p for p in places.values() if name in p and baseline in p]
            pairs = [(count(p[name]), count(p[baseline])) for p in both]
            row.append(_range([mine / its for mine, its in pairs if its]))
            row += [f"{sum(a < b for a, b in pairs)}", f"{sum(a > b for a, b in pairs)}"]
        mine = [place[name] for place in places.values() if name in place]
        bounded = [(x, x["least"]["decode_misses"]) for x in mine if x["least"]]
        rows.append([*row, _range([count_moved(line) / least for line, least in bounded if least])])
    told = ("/ its", "less in", "more in")
    headings = (f"{what} {one}" for what in ("moved", "misses") for one in told)
    return Table(title_beside(baseline), ("policy", *headings, "moved / MIN"), rows)


RATIOS: Mapping[str, Callable[[Line], float | None]] = {
    "hit rate": hit_share,
    "misses": lambda line: line.get("decode_misses"),
    "bytes": lambda line: line.get("decode_bytes"),
    "tokens/s": lambda line: line.get("tokens_per_s"),
}
"""What the table over seeds compares, each over the baseline's."""


def _by_seeds(records: Records) -> Table:
    """Makes the table of each policy over the baseline with the same seed: the mean and its 95%
    interval, Student's t over the seeds. A ratio that fewer seeds have, since the baseline's figure
    is 0 in the others, says how many."""
    asked = records.asked
    lines = {tuple(line[name] for name in PLACE): line for line in records.summary()}
    places: dict[tuple[Any, ...], list[tuple[Line, Line]]] = {}
    for line in lines.values():
        its = lines.get(tuple({**line, "policy": asked["baseline"]}[name] for name in PLACE))
        if line["policy"] != asked["baseline"] and its and line["runs"] and its["runs"]:
            place = tuple(line[name] for name in PLACE if name != "seed")
            places.setdefault(place, []).append((line, its))
    found: list[tuple[Line, list[list[float]]]] = []
    for pairs in places.values():
        values = [[(value(line), value(its)) for line, its in pairs] for value in RATIOS.values()]
        ratios = [[mine / base for mine, base in v if mine is not None and base] for v in values]
        if max(map(len, ratios)) > 1:
            found.append((pairs[0][0], ratios))
    rows = []
    for name, (line, ratios) in zip(labels([line for line, _ in found]), found, strict=True):
        most, row = max(map(len, ratios)), [name]
        row += [str(line[key]) for key in ("budget", "text", "batch", "prompt_tokens", "link_rate")]
        row.append(str(most))
        for each in ratios:
            said = "{:.3f} [{:.3f}, {:.3f}]".format(*over_seeds(each)) if len(each) > 1 else NONE
            row.append(f"{said} ({len(each)} seeds)" if 1 < len(each) < most else said)
        rows.append(row)
    headings = ("policy", "budget", "text", "batch", "prompt", "link", "seeds", *RATIOS)
    return Table(f"Over {asked['baseline']} with the same seed", headings, rows)


def _range(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}" if values else NONE
