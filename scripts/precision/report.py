"""What the command `compare` found: tables with paired intervals, and plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.parts.plots import pyplot
from scripts.precision.stream import by_window, level, tokens_to_follow

__all__ = ["difference", "draw", "pyplot", "shifts_of", "show"]

DRAWS = 10_000
"""Draws of the bootstrap."""

Line = Mapping[str, Any]


def difference(a: Line, b: Line, seed: int = 0) -> tuple[float, float, float]:
    """By how many per cent a's perplexity is above b's: (of all windows, 2.5%, 97.5%) over
    bootstrap draws of whole windows, the same ones of both, as many of each domain as there are."""
    rng, found, drawn, tokens = np.random.default_rng(seed), 0.0, np.zeros(DRAWS), 0
    for domain in a["nll"]:
        gap = np.asarray(a["nll"][domain]) - np.asarray(b["nll"][domain])
        chosen = rng.integers(len(gap), size=(DRAWS, len(gap)))
        found, drawn = found + gap.sum(), drawn + gap[chosen].sum(axis=1)
        tokens += len(gap) * a["tokens"]
    low, high = np.percentile(drawn, [2.5, 97.5])
    percent = [100 * float(np.expm1(x / tokens)) for x in (found, low, high)]
    return percent[0], percent[1], percent[2]


def perplexity(line: Line, domains: Iterable[str] | None = None) -> float:
    """Over the windows of all domains, each token alike."""
    values = [np.asarray(line["nll"][d]) for d in domains or line["nll"]]
    tokens = sum(len(v) for v in values) * line["tokens"]
    return float(np.exp(sum(v.sum() for v in values) / tokens))


def merged(lines: Sequence[Line], arm: str) -> dict[str, Any]:
    """One line with the mean −ln p of each window over runs that differ in order or seed."""
    nll = {d: np.mean([line["nll"][d] for line in lines], axis=0).tolist() for d in lines[0]["nll"]}
    peaks = [line["stats"]["peak_bytes"] for line in lines if line.get("stats")]
    peak = {"peak_bytes": max(peaks)} if peaks else {}
    return {**lines[0], "arm": arm, "nll": nll, "runs": len(lines), **peak}


def arms_of(lines: Sequence[Line], pair: str) -> list[dict[str, Any]]:
    """The lines of a pair, random maps and orders of DynaExq each as one."""
    mine = [line for line in lines if line["pair"] == pair]
    kinds: dict[str, list[Line]] = {}
    for line in mine:
        kinds.setdefault(re.sub(r"^random \d+$", "random", line["arm"]), []).append(line)
    return [
        merged(group, arm if len(group) == 1 else f"{arm} (mean of {len(group)})")
        for arm, group in kinds.items()
    ]


def pairs_of(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["pair"] for line in lines if line["pair"]))


def uniform(lines: Sequence[Line], version: str) -> Line:
    return next(line for line in lines if line["pair"] is None and line["version"] == version)


def show(lines: Sequence[Line]) -> None:
    """Prints a table for the uniform versions, one for each pair, and those of the studies."""
    from rich.console import Console

    console = Console()
    console = Console(width=None if console.is_terminal else 170)
    ends = [line for line in lines if line["pair"] is None]
    domains = list(ends[0]["nll"])
    windows = len(ends[0]["nll"][domains[0]])
    title = f"all experts in one version: perplexity, {windows} windows of 512 tokens a domain"
    _table(console, title, [("dense", uniform(lines, "dense"))], ends)
    for line in ends:
        if line.get("choices"):
            told = ", ".join(f"{name} {value:.1f}" for name, value in line["choices"].items())
            console.print(f"{line['version']}: {line['quantizer']}; −ln p of validation: {told}")
    main = [line for line in lines if line["pair"] and not line.get("study")]
    for pair in pairs_of(main):
        arms = arms_of(main, pair)
        rivals: list[tuple[str, Line]] = [
            ("calibrated", x) for x in arms if x["arm"] == "calibrated on all"
        ]
        title = f"{pair}: {arms[0]['high']} of {arms[0]['experts']} experts high in fixed maps"
        if (rival := arms[0]["rival"]) is not None:
            rivals.insert(0, (f"all {rival}", uniform(lines, rival)))
            arms.insert(0, dict(uniform(lines, rival)))
        # In fewer bytes than the arms: what DynaExq's own paper compares with (its Table 4).
        low = pair.partition("@")[0].partition("/")[2]
        rivals.append((f"all {low}", uniform(lines, low)))
        arms.append(dict(uniform(lines, low)))
        _table(console, title, rivals, arms)
        _show_moves(console, [x for x in main if x["pair"] == pair and x["arm"] == "DynaExq"])
    _show_ablations(console, lines)
    shares = [line for line in lines if line.get("study") == "hi-share"]
    for pair in pairs_of(shares):
        arms = arms_of(shares, pair)
        title = f"hi-share, {pair}: {arms[0]['high']} of {arms[0]['experts']} experts high"
        rivals = [(name, x) for x in arms for name in ("calibrated", "random") if name in x["arm"]]
        _table(console, title, rivals, arms)
    _show_shifts(console, [line for line in lines if line.get("study") == "shifts"])


def _table(
    console: Any, title: str, rivals: Sequence[tuple[str, Line]], arms: Sequence[Line]
) -> None:
    from rich.table import Table

    domains = list(arms[0]["nll"])
    found = Table(title=title)
    for heading in ("arm", "bytes/dense", "of budget (peak)", *domains, "all"):
        found.add_column(heading, no_wrap=True, justify="left" if heading == "arm" else "right")
    for name, _ in rivals:
        found.add_column(f"above {name}, %", no_wrap=True, justify="right")
    for arm in arms:
        each = [f"{perplexity(arm, [d]):.3f}" for d in domains]
        gaps = ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*difference(arm, r)) for _, r in rivals]
        share = f"{arm['bytes'] / arm['dense_bytes']:.4f}"
        told = bytes_told(arm)
        found.add_row(arm["arm"], share, told, *each, f"{perplexity(arm):.3f}", *gaps)
    console.print(found)


def bytes_told(line: Line) -> str:
    """How far a line's bytes are from its budget, and those that were taken at most; "!" marks
    whatever is more than 1% above."""
    if "budget" not in line:
        return ""
    found = [100 * (line["bytes"] / line["budget"] - 1)]
    if (stats := line.get("stats")) is not None:
        found.append(100 * (line.get("peak_bytes", stats["peak_bytes"]) / line["budget"] - 1))
    first, *peak = [f"{x:+.2f}%" + "!" * (x > 1) for x in found]
    return first + "".join(f" ({x})" for x in peak)


def _show_moves(console: Any, lines: Sequence[Line]) -> None:
    """What DynaExq did, and how far the high set is that of the domain."""
    if not lines:
        return
    stats = [line["stats"] for line in lines]
    means = {
        name: np.mean([s[name] for s in stats]) for name in ("promotions", "demotions", "deferred")
    }
    moved = np.mean([s["promoted_bytes"] + s["demoted_bytes"] for s in stats])
    console.print(
        "DynaExq, a run: "
        + ", ".join(f"{value:.0f} {name}" for name, value in means.items())
        + f", {moved / 1e6:.1f} MB moved in {lines[0]['steps']} steps; "
        + f"settings {lines[0]['settings']}"
    )
    for place in range(len(lines[0]["order"])):
        curves = [line["agreement"][line["order"][place]] for line in lines]
        begin, reached = np.mean([[curve[0][1], level(curve)] for curve in curves], axis=0)
        console.print(
            f"  domain {place + 1} of the stream: {begin:.0%} of its own hottest experts are high "
            f"when it begins, {reached:.0%} in its second half"
        )


def _show_ablations(console: Any, lines: Sequence[Line]) -> None:
    """Each beside DynaExq over the same order."""
    from rich.table import Table

    rows = [line for line in lines if line.get("study") == "ablation"]
    if not rows:
        return
    found = Table(title="ablations, against DynaExq in the same order")
    for heading in ("pair", "arm", "of budget (peak)", "perplexity", "above DynaExq, %"):
        found.add_column(heading, no_wrap=True)
    for heading in ("promotions", "demotions"):
        found.add_column(heading, justify="right")
    base = {
        (x["pair"], *x["order"]): x for x in lines if x["arm"] == "DynaExq" and not x.get("study")
    }
    told: set[tuple[str, ...]] = set()
    for line in rows:
        key = line["pair"], *line["order"]
        for row in ([] if key in told else [base[key]]) + [line]:
            told.add(key)
            gap = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*difference(row, base[key]))
            moves = [str(row["stats"][name]) for name in ("promotions", "demotions")]
            figures = bytes_told(row), f"{perplexity(row):.3f}", gap
            found.add_row(row["pair"], row["arm"], *figures, *moves)
    console.print(found)


def shifts_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """By pair and arm of the study of shifts: how the high set follows. A domain that is not the
    first of its stream is a shift. `reach` is the mean agreement of its second half where
    transitions block, that is what the policy wants; `tokens` of each shift: until the high set
    has gone 90% of the way there, None where it has not."""

    def wanted(line: Line) -> Line:
        arm = "decode, blocking" if line["arm"].startswith("decode") else "blocking"
        same = line["pair"], arm, line["order"]
        return next(x for x in lines if (x["pair"], x["arm"], x["order"]) == same)

    kinds: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        kinds.setdefault((line["pair"], line["arm"]), []).append(line)
    found = []
    for (pair, arm), group in kinds.items():
        curves, reach = [], []
        for line in group:
            for domain in line["order"][1:]:
                curves.append(line["agreement"][domain])
                reach.append(level(wanted(line)["agreement"][domain]))
        moves = sum(x["stats"]["promotions"] + x["stats"]["demotions"] for x in group)
        found.append(
            {
                "pair": pair,
                "arm": arm,
                "high": group[0]["high"],
                "steps": sum(x["steps"] for x in group) // len(group),
                "moves": moves / sum(x["steps"] for x in group),
                "begin": float(np.mean([curve[0][1] for curve in curves])),
                "level": float(np.mean([level(curve) for curve in curves])),
                "reach": float(np.mean(reach)),
                "tokens": [tokens_to_follow(c, r) for c, r in zip(curves, reach, strict=True)],
                "line": merged(group, arm),
            }
        )
    return found


def _show_shifts(console: Any, lines: Sequence[Line]) -> None:
    from rich.table import Table

    if not lines:
        return
    found = Table(title="after a shift of the domain: own hottest experts that are high")
    headings = "at first", "2nd half", "if unbounded", "tokens to 90% of the way", "perplexity"
    for heading in ("pair", "arm", "high", "steps", "transitions a step", *headings):
        found.add_column(heading, no_wrap=heading in ("pair", "arm"), justify="right")
    for row in shifts_of(lines):
        came = [t for t in row["tokens"] if t is not None]
        told = f"{len(came)} of {len(row['tokens'])} shifts"
        if came:
            told += f", mean {np.mean(came):.0f}"
        shares = [f"{row[name]:.0%}" for name in ("begin", "level", "reach")]
        value = f"{perplexity(row['line']):.3f}" if row["line"]["nll"] else "(sampled)"
        counts = str(row["high"]), str(row["steps"]), f"{row['moves']:.2f}"
        found.add_row(row["pair"], row["arm"], *counts, *shares, told, value)
    console.print(found)


# ---- plots


def draw(lines: Sequence[Line], directory: Path) -> list[Path]:
    """Writes precision.png, perplexity against bytes with a panel for each domain, and
    convergence.png, how the high set follows the domains."""
    plt = pyplot()
    return [_draw_bytes(plt, lines, directory), _draw_convergence(plt, lines, directory)]


_MARKERS = {
    "calibrated on all": ("s", "map calibrated on all domains"),
    "calibrated": (".", "map calibrated on one domain"),
    "error-weighted": ("D", "map weighted by error"),
    "random": ("x", "random map"),
    "oracle of each domain, error": ("v", "oracle weighted by error"),
    "oracle": ("^", "oracle of each domain"),
    "DynaExq error": ("P", "DynaExq weighted by error"),
    "DynaExq": ("*", "DynaExq"),
}
"""Beginning of an arm's name → (marker, what the legend says), the first that fits."""


def _draw_bytes(plt: Any, lines: Sequence[Line], directory: Path) -> Path:
    ends = sorted((x for x in lines if x["pair"] is None), key=lambda x: x["bytes"])
    main = [x for x in lines if x["pair"] and not x.get("study")]
    domains = list(ends[0]["nll"])
    figure, panels = plt.subplots(1, len(domains), figsize=(4.2 * len(domains), 4.6), squeeze=False)
    colours = {pair: f"C{i}" for i, pair in enumerate(pairs_of(main))}
    named: dict[str, Any] = {}
    for panel, domain in zip(panels[0], domains, strict=True):
        points = [(x["bytes"] / x["dense_bytes"], perplexity(x, [domain])) for x in ends]
        drawn = panel.plot(*zip(*points, strict=True), "o-", color="black", markersize=5)
        named["all in one version"] = drawn[0]
        for (x, y), line in zip(points, ends, strict=True):
            panel.annotate(line["version"], (x, y), textcoords="offset points", xytext=(5, 5))
        for pair, colour in colours.items():
            arms = arms_of(main, pair)
            for place, arm in enumerate(arms):
                marker, told = next(v for k, v in _MARKERS.items() if arm["arm"].startswith(k))
                # Side by side, because all have the same bytes.
                at = arm["bytes"] / arm["dense_bytes"] * 1.025 ** (place - len(arms) / 2)
                style = dict(color=colour, markersize=9 if "DynaExq" in told else 5)
                panel.plot(at, perplexity(arm, [domain]), marker, **style)
                named[told] = plt.Line2D([], [], color="grey", marker=marker, linestyle="none")
        panel.set_title(domain)
        panel.set_xlabel("bytes of experts / dense (arms set side by side)")
        panel.set_xscale("log", base=2)
        panel.set_xticks([1 / 8, 1 / 4, 1 / 2, 1], ["1/8", "1/4", "1/2", "1"])
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("perplexity (lower is better)")
    for pair, colour in colours.items():
        named[pair] = plt.Line2D([], [], color=colour, linewidth=6)
    figure.legend(named.values(), named.keys(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.055 * -(-len(named) // 4), 1, 1))
    path = directory / "precision.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def _draw_convergence(plt: Any, lines: Sequence[Line], directory: Path) -> Path:
    """The share of a domain's own hottest experts that is high, along the stream, mean over
    orders: DynaExq of each pair, and what more transitions do."""
    rows = [x for x in lines if x.get("nll") and "agreement" in x]
    studied = [x for x in rows if x.get("study") == "shifts"]
    plain = [x for x in rows if x["arm"] == "DynaExq" and not x.get("study")]
    groups = [(pair, [x for x in plain if x["pair"] == pair]) for pair in pairs_of(plain)]
    panels = [("DynaExq as tuned, all orders", groups)] if plain else []
    for pair in pairs_of(studied):
        mine = [x for x in studied if x["pair"] == pair]
        arms = dict.fromkeys(x["arm"] for x in mine)
        panels.append((pair, [(arm, [x for x in mine if x["arm"] == arm]) for arm in arms]))
    width = max(len(panels), 1)
    figure, axes = plt.subplots(1, width, figsize=(4.2 * width, 4.2), squeeze=False, sharey=True)
    for panel, (title, curves) in zip(axes[0], panels, strict=False):
        for label, runs in curves:
            first = runs[0]["order"][0]
            windows = len(runs[0]["nll"][first])
            each = [
                np.concatenate([by_window(x["agreement"][d], windows) for d in x["order"]])
                for x in runs
            ]
            panel.plot(np.mean(each, axis=0), label=label, linewidth=1.3)
            for shift in range(windows, len(each[0]), windows):
                panel.axvline(shift - 0.5, color="grey", linewidth=0.6)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("window of 512 tokens; lines: the domain changes", fontsize=8)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    axes[0][0].set_ylim(0, 1)
    axes[0][0].set_ylabel("share of the domain's own\nhottest experts that is high")
    figure.tight_layout()
    path = directory / "convergence.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path
