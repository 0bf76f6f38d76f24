"""What compare_policies.py found: a table and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax import UserError

BOUNDS = ("MIN", "MIN, one pool")
"""Names of bounds.min_transfers with cells of each layer, and with cells that all layers share."""

EVICTIONS = ("lru", "lfu", "lfru", "fifo", "static", "static-layers")
"""Policies that move nothing ahead of need but to fill their set once; drawn with whole lines."""

_COOL = ("#1f77b4", "#17becf", "#2ca02c", "#7f7f7f", "#5254a3", "#bcbd22")
_WARM = ("#d62728", "#ff7f0e", "#f7b6d2", "#9467bd", "#8c564b", "#7b0000", "#c7a76c", "#e6ac00")
_MARKERS = "osD^v*PX"


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table, a section for each source, batch and budget."""
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="decode steps only; shares are of references (layer-experts needed)")
    for heading in ("routing", "batch", "cells"):
        table.add_column(heading, no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("misses", "transfers", "MB/step", "recall", "precision", "wasted MB/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for line in lines:
        place = line["source"], str(line["batch"]), f"{line['cells']}/{line['experts']}"
        if before not in (None, place):
            table.add_section()
        shares = (f"{line[name] / line['references']:.2%}" for name in ("misses", "transfers"))
        moved = f"{line['bytes'] / line['steps'] / 1e6:.2f}"
        score = ["", "", ""]
        if line.get("ahead"):
            wasted = line["wasted_bytes"] / line["steps"] / 1e6
            score = [f"{line['recall']:.2f}", f"{line['precision']:.2f}", f"{wasted:.2f}"]
        table.add_row(
            *(place if place != before else ("",) * 3), line["policy"], *shares, moved, *score
        )
        before = place
    console = Console()
    # Into a file rich would fold the table to 80 columns.
    Console(width=None if console.is_terminal else 140).print(table)


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots need matplotlib: pip install matplotlib; or leave them out with --no-plots"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw(lines: Sequence[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Writes misses.png and transfers.png: a panel for each source (across) and batch (down)."""
    plt = pyplot()
    sources = list(dict.fromkeys(line["source"] for line in lines))
    batches = sorted({line["batch"] for line in lines})
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    written = []
    for what in ("misses", "transfers"):
        figure, panels = plt.subplots(
            len(batches),
            len(sources),
            figsize=(4.6 * len(sources) + 2.4, 5.0 * len(batches)),
            squeeze=False,
            sharey="row",
        )
        for row, batch in zip(panels, batches, strict=True):
            for panel, source in zip(row, sources, strict=True):
                here = [x for x in lines if (x["source"], x["batch"]) == (source, batch)]
                _panel(panel, here, policies, what)
                panel.set_title(f"{source}, batch {batch}")
            row[0].set_ylabel(f"{what} / references")
            row[0].set_ylim(0, _top([x for x in lines if x["batch"] == batch], what))
        handles = {}
        for panel in panels.flat:
            handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles, loc="center right", fontsize=9)
        figure.supxlabel("cells of a layer (a line that leaves its panel: see the table)", x=0.45)
        figure.tight_layout(rect=(0, 0, 1 - 2.0 / figure.get_figwidth(), 1))
        path = directory / f"{what}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


def _panel(
    panel: Any, lines: Sequence[Mapping[str, Any]], policies: Sequence[str], what: str
) -> None:
    """One line for each policy."""
    ahead = [name for name in policies if name not in (*BOUNDS, *EVICTIONS)]
    for name in policies:
        points = [(x["cells"], x[what] / x["references"]) for x in lines if x["policy"] == name]
        if not points:
            continue
        if name in BOUNDS:
            style = dict(color="black", linestyle=("-", ":")[BOUNDS.index(name)], linewidth=2.5)
        else:
            names, colours, line = (ahead, _WARM, "--")
            if name in EVICTIONS:
                names, colours, line = (EVICTIONS, _COOL, "-")
            place = names.index(name)
            style = dict(color=colours[place % len(colours)], marker=_MARKERS[place % 8])
            style |= dict(linestyle=line, markersize=5, linewidth=1.3)
        panel.plot(*zip(*sorted(points), strict=True), label=name, **style)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)


def _top(lines: Sequence[Mapping[str, Any]], what: str) -> float:
    """Of the axis. A policy that moves many times more than all others would flatten them, so a
    highest line beyond twice the second one leaves the panel."""
    peaks: dict[str, float] = {}
    for line in lines:
        share = line[what] / line["references"]
        peaks[line["policy"]] = max(peaks.get(line["policy"], 0.0), share)
    second, first = sorted(peaks.values())[-2:]
    return 1.05 * (first if first <= 2 * second else second) or 1.0
