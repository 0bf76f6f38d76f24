"""What the command `compare` found: a table and plots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.parts.plots import pyplot

BOUNDS = ("MIN", "MIN, one pool")
"""Names of bounds.min_transfers with cells of each layer, and with cells that all layers share."""

EVICTIONS = ("lru", "lfu", "lfru", "fifo", "static", "static-layers")
"""Policies that move nothing ahead of need but to fill their set once; drawn with whole lines."""

_COOL = ("#1f77b4", "#17becf", "#2ca02c", "#7f7f7f", "#5254a3", "#bcbd22")
_WARM = ("#d62728", "#ff7f0e", "#f7b6d2", "#9467bd", "#8c564b", "#7b0000", "#c7a76c", "#e6ac00")
_MARKERS = "osD^v*PX"


_LEAST = 0.005
"""Shares below it are not drawn."""

_Y = {
    "misses": "misses / layer-experts that steps needed",
    "transfers": "transfers / those of LRU (what is beyond 2.5: see the table)",
}


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table, a section for each source, batch and budget."""
    from rich.console import Console
    from rich.table import Table

    caption = "decode steps only; shares are of references (layer-experts needed)"
    timed = any("stall_s" in line for line in lines)
    if timed:
        caption += "; times are predicted: moving, if nothing overlaps; stall, if all does"
    table = Table(caption=caption)
    for heading in ("routing", "prompt", "batch", "cells"):
        table.add_column(heading, no_wrap=True)
    table.add_column("policy", no_wrap=True)
    headings = ["misses", "transfers", "MB/step", "recall", "precision", "wasted MB"]
    for heading in headings + ["moving ms", "stall ms"] * timed:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for line in lines:
        place = (line["source"], line["context"], str(line["batch"]))
        place += (f"{line['cells']}/{line['experts']}",)
        if before not in (None, place):
            table.add_section()
        shares = (f"{line[name] / line['references']:.2%}" for name in ("misses", "transfers"))
        moved = f"{line['bytes'] / line['steps'] / 1e6:.2f}"
        score = ["", "", ""]
        if line.get("ahead"):
            wasted = line["wasted_bytes"] / line["steps"] / 1e6
            score = [f"{line['recall']:.2f}", f"{line['precision']:.2f}", f"{wasted:.2f}"]
        if timed:
            score += [f"{line[name] * 1e3:.3f}" for name in ("moving_s", "stall_s")]
        where = place if place != before else ("",) * len(place)
        table.add_row(*where, line["policy"], *shares, moved, *score)
        before = place
    console = Console()
    # Into a file rich would fold the table to 80 columns.
    Console(width=None if console.is_terminal else 160).print(table)


def write_tables(lines: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Writes curves.md: for each context misses / transfers as percentages of references, at the
    budgets nearest to a half of the experts that have a bound, if any has; with predicted stalls
    where there are any."""
    text = []
    for context in dict.fromkeys(line["context"] for line in lines):
        here = [line for line in lines if line["context"] == context]
        panels = list(dict.fromkeys((x["source"], x["batch"]) for x in here))
        chosen = {}
        for panel in panels:
            mine = [x for x in here if (x["source"], x["batch"]) == panel]
            experts = mine[0]["experts"]
            bounded = {x["cells"] for x in mine if x["policy"] == "MIN"} - {experts}
            budgets = bounded or {x["cells"] for x in mine}
            cells = min(budgets, key=lambda n: abs(2 * n - experts))
            chosen[panel] = {x["policy"]: x for x in mine if x["cells"] == cells}
        heads = [
            f"{source} b{batch}, {next(iter(found.values()))['cells']} cells"
            for (source, batch), found in chosen.items()
        ]
        text += [f"Prompts: {context}", "", f"| policy | {' | '.join(heads)} |"]
        text.append("|---" * (len(heads) + 1) + "|")
        for policy in dict.fromkeys(line["policy"] for line in here):
            row = [_cell(found.get(policy)) for found in chosen.values()]
            text.append(f"| `{policy}` | {' | '.join(row)} |")
        text.append("")
    path = directory / "curves.md"
    path.write_text("\n".join([*text, *beside_lru(lines)]))
    return path


def beside_lru(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of each policy beside LRU over all places below full residency: in how many it moves
    or misses less and more, and by which factors; in how many it is the least (or, of transfers,
    the most) of all that know no future; ties count for everybody. Then LRU beside MIN."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        if line["cells"] < line["experts"]:
            place = line["source"], line["context"], line["batch"], line["cells"]
            found.setdefault(place, {})[line["policy"]] = line
    places = list(found.values())
    known = [name for name in dict.fromkeys(x["policy"] for x in lines) if name not in BOUNDS]
    heads = [f"{what} {told}" for what in ("transfers", "misses") for told in _TOLD]
    text = [f"Beside LRU, {len(places)} places below full residency", ""]
    text += [f"| policy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for policy in known:
        row = []
        for what in ("transfers", "misses"):
            pairs = [(x[policy][what], x["lru"][what], _least(x, known, what)) for x in places]
            ratios = [mine / lru for mine, lru, _ in pairs if lru]
            row.append(f"{min(ratios):.3f}–{max(ratios):.3f}" if ratios else "–")
            row += [str(sum(r < 1 for r in ratios)), str(sum(r > 1 for r in ratios))]
            row += [str(sum(mine == ends[i] for mine, _, ends in pairs)) for i in (0, 1)]
        text.append(f"| `{policy}` | {' | '.join(row)} |")
    bounded = [x for x in places if x.get("MIN", {}).get("transfers")]
    for name, of in (
        ("LRU", [x["lru"]["transfers"] / x["MIN"]["transfers"] for x in bounded]),
        ("the least", [_least(x, known, "transfers")[0] / x["MIN"]["transfers"] for x in bounded]),
    ):
        if of:
            text += [
                "",
                f"{name} / MIN: {min(of):.2f}–{max(of):.2f}, {len(of)} places with a bound",
            ]
    return [*text, ""]


_TOLD = ("/ LRU's", "less in", "more in", "the least in", "the most in")


def _least(place: Mapping[str, Any], known: Sequence[str], what: str) -> tuple[float, float]:
    """(least, most) of the policies that know no future."""
    found = [place[name][what] for name in known if name != "oracle"]
    return min(found), max(found)


def write_pairs(lines: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Writes coactivation.md: LRU without and with prefetch side by side, a row for each place."""
    heads = ("routing", "batch", "cells", "largest step", "misses off", "misses on")
    heads += ("link bytes on/off", "ahead", "recall", "precision")
    text = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for off, on in zip(lines[::2], lines[1::2], strict=True):
        row = [off["source"], off["batch"], f"{off['cells']}/{off['experts']}", off["largest_step"]]
        row += [f"{x['misses'] / x['references']:.1%}" for x in (off, on)]
        row += [f"{on['bytes'] / off['bytes']:.2f}×" if off["bytes"] else "–", f"{on['ahead']:.0f}"]
        row += [f"{on[name]:.2f}" if on["ahead"] else "–" for name in ("recall", "precision")]
        text.append(f"| {' | '.join(map(str, row))} |")
    path = directory / "coactivation.md"
    path.write_text("\n".join([*text, ""]))
    return path


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "–"
    found = [f"{100 * line[what] / line['references']:.1f}" for what in ("misses", "transfers")]
    stall = f" ({1e3 * line['stall_s']:.2f} ms)" if "stall_s" in line else ""
    return " / ".join(found) + stall


def draw(lines: Sequence[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Writes misses-CONTEXT.png and transfers-CONTEXT.png: a panel for each source (across) and
    batch (down). Transfers are multiples of LRU's, since most policies lie close together."""
    contexts = dict.fromkeys(line["context"] for line in lines)
    written = []
    for context in contexts:
        here = [line for line in lines if line["context"] == context]
        for what in ("misses", "transfers"):
            path = directory / f"{what}-{context.replace(' ', '-')}.png"
            _save(_figure(here, what, context), path)
            written.append(path)
    pyplot().close("all")
    return written


def _save(figure: Any, path: Path) -> None:
    """With 256 colours, which is a third of the bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)


def _figure(lines: Sequence[Mapping[str, Any]], what: str, context: str) -> Any:
    plt = pyplot()
    sources = list(dict.fromkeys(line["source"] for line in lines))
    batches = sorted({line["batch"] for line in lines})
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    size = 4.2 * len(sources) + 0.6, 3.6 * len(batches) + 1.6
    figure, panels = plt.subplots(
        len(batches), len(sources), figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    for row, batch in zip(panels, batches, strict=True):
        for panel, source in zip(row, sources, strict=True):
            here = [x for x in lines if (x["source"], x["batch"]) == (source, batch)]
            _panel(panel, here, policies, what)
            panel.set_title(f"{source}, batch {batch}")
            if what == "misses":
                panel.set_ylim(max(panel.get_ylim()[0], _LEAST), 1.2)
            if batch == batches[-1]:
                panel.set_xlabel(f"cells of a layer, of its {here[0]['experts']} experts")
    figure.supylabel(_Y[what])
    prompts = context if context == "generated" else f"prompts of {context}"
    figure.suptitle(f"{what.capitalize()} in decode steps, {prompts} (simulator)")
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    columns = max(2, round(size[0] / 2.3))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
    return figure


def _panel(
    panel: Any, lines: Sequence[Mapping[str, Any]], policies: Sequence[str], what: str
) -> None:
    """One line for each policy; those that look ahead are dashed, bounds are black."""
    from matplotlib import ticker

    ahead = [name for name in policies if name not in (*BOUNDS, *EVICTIONS)]
    lru = [x for x in lines if x["policy"] == "lru" and x[what] > _LEAST * x["references"]]
    least = {line["cells"]: line[what] for line in lru}
    for name in policies:
        mine = [x for x in lines if x["policy"] == name]
        if what == "misses":
            points = [(x["cells"], share) for x in mine if (share := x[what] / x["references"])]
        else:
            points = [
                (x["cells"], x[what] / least[x["cells"]]) for x in mine if x["cells"] in least
            ]
        if not points:
            continue
        if name in BOUNDS:
            style: dict[str, Any] = dict(color="black", linewidth=2.5, zorder=3)
            style |= dict(linestyle=("-", ":")[BOUNDS.index(name)])
        else:
            names, colours, line = (ahead, _WARM, "--")
            if name in EVICTIONS:
                names, colours, line = (EVICTIONS, _COOL, "-")
            place = names.index(name)
            style = dict(color=colours[place % len(colours)], marker=_MARKERS[place % 8])
            style |= dict(linestyle=line, markersize=4.5, linewidth=1.2)
        panel.plot(*zip(*sorted(points), strict=True), label=name, **style)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    if what == "transfers":
        panel.set_ylim(0, 2.5)
        return
    panel.set_yscale("log")
    # No labels between powers of ten, where they would overlap.
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
