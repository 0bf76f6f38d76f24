"""The report's tables of precisions: how likely they find texts, and how long their steps take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moejax.evaluate.experiments.quality import compared_quality
from moejax.evaluate.experiments.records import PLACE, Records

QUALITY_HEADINGS = (
    *("precision", "text", "perplexity", "above {first}", "tokens", "budget"),
    *("MiB", "high/low", "promoted/demoted"),
)
ALL = "all texts"

PRECISIONS = "Precisions, {baseline}"
PRECISION_HEADINGS = (
    *("precision", "budget", "batch", "prompt", "text", "MiB", "high/low", "misses/step"),
    *("bytes/step", "TPOT p50 ms", "/ {first}", "TTFT ms", "tokens/s"),
)
"""Medians of engines that ran one after the other: the quotients are not paired."""

Line = Mapping[str, Any]


def headings(names: Sequence[str], records: Records) -> list[str]:
    """Headings with the precision that others are compared with."""
    return [name.format(first=records.asked["precision"][0]) for name in names]


def quality_rows(records: Records) -> list[list[str]]:
    """A row for each text and precision: its perplexity, and by how much that is above the first
    precision's, with the 95% interval over pairs of windows; then for all texts together."""
    texts = [(text, [text]) for text in dict.fromkeys(line["text"] for line in records.quality)]
    texts += [(ALL, [text for text, _ in texts])] if len(texts) > 1 else []
    rows = []
    for name, of in texts:
        arms: dict[tuple[str, str | None], list[Line]] = {}
        for line in records.quality:
            if line["text"] in of:
                arms.setdefault((line["precision"], line.get("budget")), []).append(line)
        whole = [_together(name, found) for found in arms.values() if len(found) == len(of)]
        firsts = [line for line in whole if _is_first(line, records)]
        for line in whole:
            # The first precision of two versions has a line for each budget.
            alike = [one for one in firsts if one.get("budget") in (None, line.get("budget"))]
            above = _above(line, alike[0]) if alike and line is not alike[0] else "–"
            perplexity, tokens = f"{line['perplexity']:.4f}", str(line["tokens"])
            budget = line.get("budget") or "any"
            row = [line["precision"], name, perplexity, above, tokens, budget]
            rows.append([*row, _mib(records, line), _high(line), _moves(line)])
    return rows


def _together(name: str, lines: Sequence[Line]) -> Line:
    """Lines of several texts as one; what transitions came to is that of the last, which counts
    from the first on."""
    if len(lines) == 1:
        return lines[0]
    bits = [one for line in lines for one in line["window_bits"]]
    windows = [one for line in lines for one in line["window_tokens"]]
    found = {"text": name, "window_bits": bits, "window_tokens": windows, "tokens": sum(windows)}
    return {**lines[-1], **found, "perplexity": 2 ** (sum(bits) / sum(windows))}


def _is_first(line: Line, records: Records) -> bool:
    return line["precision"] == records.asked["precision"][0]


def _above(line: Line, first: Line) -> str:
    found = compared_quality(line, first)
    said = f"{2**found.difference - 1:+.2%}"
    if found.low is not None and found.high is not None:
        said += f" [{2**found.low - 1:+.2%}, {2**found.high - 1:+.2%}]"
    return said


def _mib(records: Records, line: Line) -> str:
    """What its experts take, where the grid says one size."""
    sizes = {
        row["expert_bytes"]
        for row in records.of_mode("measured")
        if row["precision"] == line["precision"] and line.get("budget") in (None, row["budget"])
    }
    return f"{sizes.pop() / 2**20:.2f}" if len(sizes) == 1 else "–"


def _high(line: Line) -> str:
    return f"{line['hi']:.0f}/{line['lo']:.0f}" if line.get("hi") is not None else "–"


def _moves(line: Line) -> str:
    if line.get("promotions") is None:
        return "–"
    return f"{line['promotions']:.0f}/{line['demotions']:.0f}"


def precision_rows(records: Records, lines: Sequence[Line]) -> list[list[str]]:
    """A row for each precision of each place, of the baseline; none where a grid has one precision.
    lines: of the summary."""
    names, baseline = records.asked.get("precision", ()), records.asked["baseline"]
    if len(names) < 2:
        return []
    where = [n for n in PLACE if n not in ("mode", "driver", "precision", "policy", "seed")]
    places: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        which = line["policy"], line["driver"], line["mode"]
        if which == (baseline, "device", "measured") and line["runs"]:
            places.setdefault(tuple(line[name] for name in where), []).append(line)
    rows = []
    for found in places.values():
        found = sorted(found, key=lambda line: names.index(line["precision"]))
        first = found[0] if found[0]["precision"] == names[0] else None
        rows += [_precision_row(line, first) for line in found]
    return rows


def _precision_row(line: Line, first: Line | None) -> list[str]:
    steps, tpot = line["decode_steps"] or 1, line.get("tpot_p50_s")
    base = None if first is None else first.get("tpot_p50_s")
    return [
        line["precision"],
        line["budget"],
        str(line["batch"]),
        str(line["prompt_tokens"]),
        line["text"],
        f"{line['expert_bytes'] / 2**20:.2f}",
        _high(line),
        f"{line['decode_misses'] / steps:.2f}",
        f"{line['decode_bytes'] / steps / 1024:.0f} KiB",
        _interval(line, "tpot_p50_s"),
        f"{tpot / base:.3f}" if tpot and base else "–",
        _interval(line, "ttft_s"),
        "–" if line.get("tokens_per_s") is None else f"{line['tokens_per_s']:.0f}",
    ]


def _interval(line: Line, name: str) -> str:
    if line.get(name) is None:
        return "–"
    found = f"{line[name] * 1e3:.2f}"
    if line.get(f"{name}_low") is not None:
        found += f" [{line[f'{name}_low'] * 1e3:.2f}–{line[f'{name}_high'] * 1e3:.2f}]"
    return found
