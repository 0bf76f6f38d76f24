"""Draws the papers' headline claims beside what came out here, one figure for each paper:

python -m scripts.site.headlines [FOLDER]

The figures go to docs/images, or into FOLDER. scripts/site/headlines.yaml has the numbers,
each with the command that measured it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
NUMBERS = Path(__file__).with_suffix(".yaml")
NO_NUMBER = {"paper": "no figure", "here": "not tested"}
IMAGES = REPOSITORY / "docs" / "images"


def claims_of(paper: str) -> list[dict[str, Any]]:
    """Returns a paper's claims: `claim`, the number in the `paper` and `here` (null: none),
    and the `command` that measured it."""
    return yaml.safe_load(NUMBERS.read_text())[paper]


def draw(paper: str, out: Path) -> None:
    """Two bars for each claim, the paper's above ours; a line at 1, where nothing is gained."""
    import matplotlib  # seconds, which tests of the numbers need not wait

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    claims = claims_of(paper)
    plt.rcParams.update({"svg.hashsalt": "moejax", "font.size": 11, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.62 * len(claims)), constrained_layout=True)
    for place, claim in enumerate(claims):
        for row, name, color in ((-0.2, "paper", "#9a9a9a"), (0.2, "here", "#1f77b4")):
            value = claim[name]
            label = NO_NUMBER[name] if value is None else f"{value:g}"
            axes.barh(place + row, value or 0, 0.36, color=color, label="" if place else name)
            axes.text((value or 0) + 0.02, place + row, label, va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(claims)), [claim["claim"] for claim in claims])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(c[n] or 0 for c in claims for n in ("paper", "here")))
    axes.set_xlabel("ratio; above 1: in favour of the paper")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    for each in yaml.safe_load(NUMBERS.read_text()):
        draw(each, folder / f"claims-{each}.svg")
