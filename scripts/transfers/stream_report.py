"""What `stream` measured, cell by cell, beside what the timeline says of the same cells.

python -m scripts.transfers stream_report FILE… [--decode 5GB/s] [--plot PNG] [--json]

For each place: a step's milliseconds in every arm, the median of its steps; the ratio of loading to
computing, of the bytes that stream brought at the link's stated rate; stream over the longer of
both; shares of the time in which the link was busy and in which stream waited for it, and compute /
stream. Predicted are the same arms by `stream_grid` from the measured step with every expert in
place, whose time is shared out by bytes, and from stated rates, nothing else; a link without a rate
is as fast as it was while busy.

At the end: errors of the predictions in the median and at worst; Kendall's τ over all pairs of arms
of a place that the measured steps tell apart (by more than their ranges); and for each group from
which batch on streaming is ahead of paging, measured and predicted, with the bytes that say why.
--plot draws those steps over the batch, a panel for each group with three batches of 1,024 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.checkpoints.random_model import SHAPES
from moejax.errors import UserError
from moejax.sizes import parse_rate
from scripts.parts.commands import new_parser, refuse
from scripts.parts.plots import pyplot
from scripts.transfers.streaming.cells import Cell, Machine, Shape, arm_seconds, compute_seconds


class Place(NamedTuple):
    """A cell of the grid and what was measured there."""

    group: str
    batch: int
    context: int
    compute: float
    """Seconds of a step with every expert in place."""
    rows: Mapping[str, Mapping]
    """Arm → its row."""

    @property
    def seconds(self) -> dict[str, float]:
        return {name: float(np.median(row["seconds"])) for name, row in self.rows.items()}

    @property
    def rate(self) -> float:
        """Bytes a second of the link."""
        row = self.rows["stream"]
        busy = row["link_busy"] * float(np.mean(row["seconds"]))
        return row["rate"] or row["link_mb"] * 1e6 / busy

    @property
    def link(self) -> float:
        """Seconds that what streams takes on the link alone."""
        return self.rows["stream"]["link_mb"] * 1e6 / self.rate


def read(paths: Sequence[Path]) -> list[Place]:
    """Places with their arms; of an arm that was measured again the last row. Raises UserError."""
    found: dict[tuple, dict[str, Mapping]] = {}
    compute: dict[tuple, float] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            row = json.loads(text)
            at = row["shape"], row["layers"], row["batch"], row["context"]
            if row["arm"] == "compute":
                compute[row["began"], *at] = float(np.median(row["seconds"]))
            else:
                found.setdefault((row["name"], *at), {})[row["arm"]] = row
    places = []
    for (name, *at), rows in found.items():
        of_run = (rows.get("stream", {}).get("began"), *at)
        if of_run not in compute:
            raise UserError(f"{name} at {at} has no row of stream, or of compute in the same run")
        places.append(Place(name, at[2], at[3], compute[of_run], rows))
    return places


def predicted(place: Place, decode_rate: float) -> dict[str, float]:
    """Arm → seconds of a step by the timeline."""
    row = place.rows["stream"]
    layers, hidden, width, experts, k, _, heads, size, *_ = SHAPES[row["shape"]].values()
    layers = row["layers"]
    dense = 2 * hidden * (2 * heads * size + 2 * SHAPES[row["shape"]]["num_attention_heads"] * size)
    shape = Shape(layers, experts, k, 6 * hidden * width, 4 * layers * heads * size, dense)
    # Its memory is as fast as makes a step take what was measured.
    probe = Machine(1.0, float("inf"), decode_rate)
    bytes_of_step = layers * compute_seconds(probe, shape, place.batch, place.context)
    machine = dataclasses.replace(probe, memory_rate=bytes_of_step / place.compute)
    cell = Cell(machine, shape, place.batch, place.context, place.rate, row["residents"])
    every = arm_seconds(cell)
    for name in place.rows:
        kind, _, number = name.partition("-")
        if kind == "paging" and number:
            # The window is shared over so many layers.
            deep = dataclasses.replace(
                shape, layers=int(number), kv_bytes=shape.kv_bytes * int(number) // layers
            )
            every[name] = dataclasses.replace(cell, shape=deep).paged()
    return {name: every[name] * layers for name in place.rows if name in every}


def told_apart(first: Mapping, second: Mapping) -> bool:
    """Whether the steps of two arms do not overlap."""
    a, b = first["seconds"], second["seconds"]
    return max(a) < min(b) or max(b) < min(a)


def concordance(places: Sequence[Place], said: Sequence[Mapping[str, float]]) -> tuple[float, int]:
    """(Kendall's τ, pairs) of arms of a place."""
    signs = []
    for place, guess in zip(places, said, strict=True):
        took = place.seconds
        for a, b in itertools.combinations(guess, 2):
            if told_apart(place.rows[a], place.rows[b]):
                signs.append(np.sign((took[a] - took[b]) * (guess[a] - guess[b])))
    return (float(np.mean(signs)) if signs else float("nan")), len(signs)


def line(place: Place, guess: Mapping[str, float]) -> dict:
    row, took = place.rows["stream"], place.seconds
    return {
        "group": place.group,
        "batch": place.batch,
        "context": place.context,
        "residents": row["residents"],
        "link_gb_s": place.rate / 1e9,
        "ratio": place.link / place.compute,
        "compute_ms": place.compute * 1e3,
        "ms": {name: seconds * 1e3 for name, seconds in took.items()},
        "predicted_ms": {name: seconds * 1e3 for name, seconds in guess.items()},
        "stream / max(compute, link)": took["stream"] / max(place.compute, place.link),
        "link_busy": row["link_busy"],
        "waited": row["waited"],
        "compute / stream": place.compute / took["stream"],
        "mb": {name: row["link_mb"] for name, row in place.rows.items()},
    }


def crossovers(found: Sequence[Mapping], rival: str) -> list[str]:
    """For each group and context, from which batch on streaming is ahead of a rival."""
    lines = []
    groups: dict[tuple, list[Mapping]] = {}
    for one in found:
        if rival in one["ms"]:
            groups.setdefault((one["group"], one["context"]), []).append(one)
    for (group, context), cells in groups.items():
        cells.sort(key=lambda one: one["batch"])

        def first(what: str, cells=cells) -> str:
            ahead = [c["batch"] for c in cells if c[what]["stream"] < c[what].get(rival, 0.0)]
            return f"from batch {ahead[0]}" if ahead else "never"

        moved = ", ".join(f"{c['batch']}: {c['mb'][rival]:.0f}" for c in cells)
        streamed = cells[0]["mb"]["stream"]
        lines.append(
            f"{group}, context {context}, stream before {rival}: {first('ms')}, predicted "
            f"{first('predicted_ms')}; MB a step by batch {moved}; stream {streamed:.0f}"
        )
    return lines


CONTEXT = 1024
"""Tokens of the places that are drawn."""

PANELS = 3
"""In a row."""


def draw(plt: Any, found: Sequence[Mapping], path: Path) -> None:
    """Steps over the batch, measured and predicted."""
    groups: dict[str, list[Mapping]] = {}
    for one in found:
        if one["context"] == CONTEXT:
            groups.setdefault(one["group"], []).append(one)
    groups = {name: cells for name, cells in groups.items() if len(cells) > 2}
    if not groups:
        raise UserError(f"no group has three batches of {CONTEXT} tokens to draw")
    order = sorted(groups.values(), key=lambda c: (-round(c[0]["link_gb_s"]), c[0]["residents"]))
    rows, columns = -(-len(order) // PANELS), min(len(order), PANELS)
    size = 3.6 * columns, 3.2 * rows
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for panel in panels.flat[len(order) :]:
        panel.set_visible(False)
    for panel, cells in zip(panels.flat, order, strict=False):
        cells = sorted(cells, key=lambda one: one["batch"])
        batches = [one["batch"] for one in cells]
        for colour, arm in enumerate(cells[0]["ms"]):
            for style, what in (("o-", "ms"), ("--", "predicted_ms")):
                label = arm if what == "ms" else None
                values = [one[what][arm] for one in cells]
                panel.plot(batches, values, style, color=f"C{colour}", label=label)
        first = cells[0]
        panel.set_title(f"{first['residents']} residents, {first['link_gb_s']:.1f} GB/s", size=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, map(str, batches))
        panel.set_xlabel("batch")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("ms a step; dashed: predicted")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE")
    add("--decode", default="5GB/s", help="dense bytes out of packed ones (default: %(default)s)")
    add("--plot", type=Path, metavar="PNG", help="draws steps over the batch")
    add("--json", action="store_true", help="one JSON object per place")
    args = parser.parse_args(arguments)
    try:
        places = read(args.files)
        said = [predicted(place, parse_rate(args.decode)) for place in places]
        found = [line(*pair) for pair in zip(places, said, strict=True)]
        for one in found:
            print(json.dumps(one) if args.json else _text(one))
        if not args.json:
            _summary(places, said, found)
        if args.plot is not None:
            draw(pyplot(), found, args.plot)
    except (UserError, ValueError, KeyError, OSError) as error:
        return refuse(__name__, error)
    return 0


def _summary(places: Sequence[Place], said: Sequence[Mapping], found: Sequence[Mapping]) -> None:
    pairs = [(p.seconds[a], g[a]) for p, g in zip(places, said, strict=True) for a in g]
    errors = np.array([guess / took - 1 for took, guess in pairs])
    worst = errors[np.argmax(np.abs(errors))]
    tau, count = concordance(places, said)
    print(
        f"{len(places)} places, {len(pairs)} arms of them: error {np.median(np.abs(errors)):.1%} "
        f"in the median, worst {worst:+.1%}; Kendall's τ {tau:.2f} of {count} pairs told apart"
    )
    rivals = {name for one in found for name in one["ms"] if name.startswith("paging")}
    for rival in sorted(rivals):
        print(*crossovers(found, rival), sep="\n")


def _text(one: Mapping) -> str:
    arms = ", ".join(
        f"{name} {took:.0f} ({one['predicted_ms'].get(name, float('nan')):.0f})"
        for name, took in one["ms"].items()
    )
    return (
        f"{one['group']:<10} batch {one['batch']:>3}, context {one['context']:>4}, loading "
        f"{one['ratio']:.2f} × computing ({one['link_gb_s']:.2f} GB/s), compute "
        f"{one['compute_ms']:.0f} ms; measured (predicted): {arms}; stream / max "
        f"{one['stream / max(compute, link)']:.2f}, link {one['link_busy']:.2f}, waited "
        f"{one['waited']:.2f}, compute {one['compute / stream']:.2f}"
    )
