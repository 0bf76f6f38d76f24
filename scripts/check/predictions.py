"""Predicted decode times beside measured ones, on this machine, which has to be quiet.

    python -m scripts.check predictions [--models demo tests/models/demo] [--repeats 3]

Costs are measured first (`moejax calibrate`), on other steps than those that are predicted. Then
policies × budgets × batches of each model run and are predicted; repeats alternate. Prints medians
and errors; exits with status 1 if an error is above 15%.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import moejax
from scripts.parts.commands import new_parser
from scripts.parts.text_table import aligned

MOST = 0.15
GRID: dict[str, Any] = {
    "policies": ["lru", "lfu"],
    "budgets": ["25%", "50%", "75%"],
    "batch": [1, 8],
    "prompt_tokens": [64],
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


def compare(model: str, repeats: int) -> list[dict[str, Any]]:
    """Runs the grid of a model. Returns the lines of a table."""
    with tempfile.TemporaryDirectory() as directory:
        found = moejax.ablate({**GRID, "model": model, "repeats": repeats}, f"{directory}/grid")
    times: dict[tuple, dict[str, list[float]]] = {}
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
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    rows = [row for model in args.models for row in compare(model, args.repeats)]
    print(*aligned(COLUMNS, rows), sep="\n")
    errors = [abs(row["error"]) for row in rows]
    near = sum(error <= MOST for error in errors)
    print(f"{near} of {len(rows)} within {MOST:.0%}; median error {statistics.median(errors):.1%}")
    return int(near < len(rows))
