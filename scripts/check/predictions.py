"""Predicted decode times beside measured ones, on this machine, which has to be quiet.

    python -m scripts.check predictions [--models demo tests/models/demo] [--rounds 5]

In each round the costs of a model are measured anew (`moejax calibrate`), on other steps than those
that are predicted; then policies × budgets × batches run, and are predicted. So the machine's own
changes meet both. Prints medians of the rounds and errors; exits with status 1 if an error is above
15%.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import moejax
from moejax.cache import cache_root
from moejax.costs.other_programs import ProcessorWatch
from scripts.parts.commands import new_parser
from scripts.parts.text_table import aligned

MOST = 0.15
GRID: dict[str, Any] = {
    "policies": ["lru", "lfu"],
    "budgets": ["25%", "50%", "75%"],
    "batch": [1, 8],
    "prompt_tokens": [64],
    "prompts": 8,
    "output_tokens": 48,
    "temperature": 0.0,
    "modes": ["measured", "predicted"],
    "costs": "measure",
}
"""12 places of a model."""

PLACE = ("policy", "budget", "batch")

COLUMNS = (
    ("model", "{model}"),
    *((name, f"{{{name}}}") for name in PLACE),
    ("measured ms", "{measured:.3f}"),
    ("predicted ms", "{predicted:.3f}"),
    ("error", "{error:+.1%}"),
)


def compare(model: str, rounds: int) -> list[dict[str, Any]]:
    """Runs the grid of a model in rounds, each with costs of its own. Returns the lines of a
    table."""
    times: dict[tuple, dict[str, list[float]]] = {}
    for _ in range(rounds):
        shutil.rmtree(cache_root() / "costs", ignore_errors=True)
        with tempfile.TemporaryDirectory() as directory:
            found = moejax.ablate({**GRID, "model": model}, f"{directory}/grid", progress=False)
        for row in found.rows:
            if row.get("tpot_p50_s"):
                place = tuple(row[name] for name in PLACE)
                times.setdefault(place, {}).setdefault(row["mode"], []).append(row["tpot_p50_s"])
    rows = []
    for place, of_mode in times.items():
        measured, predicted = (
            1e3 * statistics.median(of_mode[mode]) for mode in ("measured", "predicted")
        )
        figures = {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        rows.append({"model": model, **dict(zip(PLACE, place, strict=True)), **figures})
    return rows


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "tests/models/demo"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    watch = ProcessorWatch()
    with tempfile.TemporaryDirectory() as cache:  # costs of the user's own stay as they are
        os.environ["XDG_CACHE_HOME"] = cache
        rows = [row for model in args.models for row in compare(model, args.rounds)]
    print(*aligned(COLUMNS, rows), sep="\n")
    errors = [abs(row["error"]) for row in rows]
    near = sum(error <= MOST for error in errors)
    print(f"{near} of {len(rows)} within {MOST:.0%}; median error {statistics.median(errors):.1%}")
    if (others := watch.others()) is not None:
        print(f"other programs took {others:.0%} of the processors meanwhile")
    return int(near < len(rows))
