"""Which version each expert was in, over time, as pictures.

python -m scripts.precision plot TRACE DIR

TRACE is of a run that changes versions (--precision dynaexq --trace TRACE), also with paged=true.
Writes DIR/versions.png, how many experts are high, low and absent, what was moved and what waited,
and DIR/heat.png, layer × expert over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.traces.reader import read_trace
from scripts.parts.commands import new_parser, refusing
from scripts.parts.plots import pyplot
from scripts.parts.version_history import VersionHistory, version_history

_HEAT_SHOTS = 6
"""Moments that are shown beside the share of time."""


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("directory", type=Path, metavar="DIR", help="of the pictures")
    args = parser.parse_args(arguments)
    plt = pyplot()
    trace = read_trace(args.trace)
    history = version_history(trace)
    names = list(trace.header.spec["version_bytes"])
    args.directory.mkdir(parents=True, exist_ok=True)
    draw_versions(plt, history, names, args.directory / "versions.png")
    draw_heat(plt, history, names, args.directory / "heat.png")
    return 0


def draw_versions(plt: Any, history: VersionHistory, names: Sequence[str], path: Path) -> None:
    """Counts and bytes over the tokens of the run."""
    tokens = np.cumsum(history.tokens)
    figure, panels = plt.subplots(4, 1, figsize=(9, 10), sharex=True)
    counts = [np.sum(history.version == v, axis=(1, 2)) for v in range(len(names))]
    absent = history.version[0].size - np.sum(counts, axis=0)
    panels[0].stackplot(tokens, *counts, absent, labels=[*names, "absent"], step="post")
    panels[0].set_ylabel("experts")
    for cause, moved in history.moved.items():
        panels[1].step(tokens, np.cumsum(moved), where="post", label=f"{cause}s so far")
    panels[1].set_ylabel("transitions")
    panels[2].step(tokens, history.waiting, where="post", color="C3", label="wanted and waiting")
    panels[2].set_ylabel("transitions")
    panels[3].step(
        tokens, history.resident_bytes / 1e6, where="post", label="of experts, complete versions"
    )
    moved = np.cumsum(history.bytes) / 1e6
    panels[3].step(tokens, moved, where="post", label="moved by transitions so far")
    panels[3].set_ylabel("MB")
    panels[3].set_xlabel("tokens computed")
    for panel in panels:
        panel.legend(loc="upper left", fontsize=8)
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_heat(plt: Any, history: VersionHistory, names: Sequence[str], path: Path) -> None:
    """Who is high at some moments, and for which share of the steps, layer × expert."""
    steps = len(history.step)
    shots = np.unique(np.linspace(0, steps - 1, _HEAT_SHOTS).round().astype(int))
    tokens = np.cumsum(history.tokens)
    shares = np.where(history.version < 0, np.nan, history.version == 0)
    images = [(f"after {tokens[s]} tokens", shares[s]) for s in shots]
    images.append(("high, share of all steps", np.mean(history.version == 0, axis=0)))
    colours = plt.get_cmap("viridis").with_extremes(bad="lightgrey")
    rows = -(-len(images) // 2)
    layers = history.version.shape[1]
    figure, panels = plt.subplots(
        rows, 2, figsize=(13, rows * (1.2 + 0.16 * layers)), squeeze=False
    )
    for panel, (title, image) in zip(panels.flat, images, strict=False):
        shown = panel.imshow(
            image, vmin=0, vmax=1, aspect="auto", interpolation="nearest", cmap=colours
        )
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("expert", fontsize=8)
        panel.set_ylabel("layer", fontsize=8)
        panel.set_yticks(range(0, layers, max(1, layers // 6)))
    for panel in list(panels.flat)[len(images) :]:
        panel.axis("off")
    figure.tight_layout(rect=(0, 0, 0.93, 1))
    bar = figure.colorbar(shown, cax=figure.add_axes((0.945, 0.1, 0.015, 0.8)))
    absent = ", grey: absent" if np.isnan(shares).any() else ""
    bar.set_label(f"1: {names[0]}, 0: {names[-1]}{absent}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
