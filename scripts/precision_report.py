"""What compare_precision.py found: tables with paired intervals, and plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from policy_report import pyplot

__all__ = ["difference", "draw", "pyplot", "show"]

DRAWS = 10_000
"""Of the bootstrap."""

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
    return {**lines[0], "arm": arm, "nll": nll, "runs": len(lines)}


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
    """Prints a table for the uniform versions and one for each pair."""
    from rich.console import Console
    from rich.table import Table

    domains = list(lines[0]["nll"])
    windows = len(lines[0]["nll"][domains[0]])
    console = Console()
    console = Console(width=None if console.is_terminal else 150)

    def table(title: str, rivals: Sequence[tuple[str, Line]], arms: Sequence[Line]) -> None:
        found = Table(title=title)
        for heading in ("arm", "bytes/dense", *domains, "all"):
            found.add_column(heading, no_wrap=True, justify="left" if heading == "arm" else "right")
        for name, _ in rivals:
            found.add_column(f"above {name}, %", no_wrap=True, justify="right")
        for arm in arms:
            size = arm["bytes"]
            each = [f"{perplexity(arm, [d]):.3f}" for d in domains]
            gaps = ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*difference(arm, r)) for _, r in rivals]
            share = f"{size / arm['dense_bytes']:.4f}"
            found.add_row(arm["arm"], share, *each, f"{perplexity(arm):.3f}", *gaps)
        console.print(found)

    ends = [line for line in lines if line["pair"] is None]
    title = f"all experts in one version: perplexity, {windows} windows of 512 tokens a domain"
    table(title, [("dense", uniform(lines, "dense"))], ends)
    for pair in pairs_of(lines):
        arms = arms_of(lines, pair)
        rivals: list[tuple[str, Line]] = [
            ("calibrated", next(x for x in arms if x["arm"] == "calibrated on all"))
        ]
        if (rival := arms[0]["rival"]) is not None:
            rivals.insert(0, (f"all {rival}", uniform(lines, rival)))
            arms.insert(0, dict(uniform(lines, rival)))
        title = f"{pair}: {rivals[-1][1]['high']} of {rivals[-1][1]['experts']} experts high"
        table(title, rivals, arms)
        _show_moves(console, [x for x in lines if x["pair"] == pair and "order" in x])


def _show_moves(console: Any, lines: Sequence[Line]) -> None:
    """What DynaExq did, and how soon the high set is that of the domain that began."""
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
        + f", {moved / 1e6:.1f} MB moved; settings {lines[0]['settings']}"
    )
    for place in range(len(lines[0]["order"])):
        agree = np.mean([line["converged"][line["order"][place]] for line in lines], axis=0)
        plateau = float(np.mean(agree[len(agree) // 2 :]))
        near = int(np.argmax(agree >= plateau - 0.05))
        console.print(
            f"  domain {place + 1} of the stream: {agree[0]:.0%} of its own top experts are high "
            f"in its first window, {plateau:.0%} in its second half; within 5% of that after "
            f"{near} windows"
        )


# ---- plots


def draw(lines: Sequence[Line], directory: Path) -> list[Path]:
    """Writes precision.png, perplexity against bytes with a panel for each domain, and
    convergence.png."""
    plt = pyplot()
    return [_draw_bytes(plt, lines, directory), _draw_convergence(plt, lines, directory)]


_MARKERS = {
    "all": "o",
    "DynaExq": "*",
    "calibrated": "s",
    "error": "D",
    "random": "x",
    "oracle": "^",
}
_FILLED = ("on all", "weighted", ")")


def _draw_bytes(plt: Any, lines: Sequence[Line], directory: Path) -> Path:
    domains = list(lines[0]["nll"])
    figure, panels = plt.subplots(1, len(domains), figsize=(5 * len(domains), 5.2), squeeze=False)
    colours = {pair: f"C{i + 1}" for i, pair in enumerate(pairs_of(lines))}
    for panel, domain in zip(panels[0], domains, strict=True):
        ends = sorted((x for x in lines if x["pair"] is None), key=lambda x: x["bytes"])
        points = [(x["bytes"] / x["dense_bytes"], perplexity(x, [domain])) for x in ends]
        panel.plot(*zip(*points, strict=True), "o-", color="black", label="one version for all")
        for (x, y), line in zip(points, ends, strict=True):
            panel.annotate(line["version"], (x, y), textcoords="offset points", xytext=(4, 5))
        for pair, colour in colours.items():
            arms = [a for a in arms_of(lines, pair) if not a["arm"].startswith("DynaExq,")]
            for place, arm in enumerate(arms):
                kind = arm["arm"].split(" ")[0].split("-")[0]
                size = arm["bytes"] / arm["dense_bytes"]
                # Side by side, because all have the same bytes.
                at = size + 0.012 * (place - len(arms) / 2)
                panel.plot(
                    at,
                    perplexity(arm, [domain]),
                    _MARKERS[kind],
                    color=colour,
                    markersize=9 if kind == "DynaExq" else 6,
                    markerfacecolor=colour if arm["arm"].endswith(_FILLED) else "none",
                    label=f"{pair}: {arm['arm']}",
                )
        panel.set_title(domain)
        panel.set_xlabel("bytes of the experts / dense (arms of a pair set side by side)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("perplexity (lower is better)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8)
    rows = -(-len(labels) // 4)
    figure.tight_layout(rect=(0, 0.035 * rows + 0.02, 1, 1))
    path = directory / "precision.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_convergence(plt: Any, lines: Sequence[Line], directory: Path) -> Path:
    """How far the high set is the domain's own, along the stream, mean over orders."""
    figure, panel = plt.subplots(figsize=(9, 4))
    moving = [x["pair"] for x in lines if "order" in x]
    for number, pair in enumerate(dict.fromkeys(moving)):
        runs = [x for x in lines if x["pair"] == pair and "order" in x]
        curves = [np.concatenate([x["converged"][d] for d in x["order"]]) for x in runs]
        mean = np.mean(curves, axis=0)
        panel.plot(mean, color=f"C{number + 1}", label=pair)
        windows = len(mean) // len(runs[0]["order"])
        for shift in range(windows, len(mean), windows):
            panel.axvline(shift - 0.5, color="grey", linewidth=0.8)
    panel.set_ylim(0, 1)
    panel.set_xlabel("window of 512 tokens; lines: the domain changes")
    panel.set_ylabel("share of the domain's own\nhottest experts that is high")
    panel.grid(alpha=0.3)
    if moving:
        panel.legend()
    figure.tight_layout()
    path = directory / "convergence.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
