"""Predicted decode times beside measured ones, on this machine, which has to be quiet.

    python -m scripts.check predictions [--models demo tests/models/demo] [--rounds 5]

The costs of a model are measured anew for each batch (`moejax calibrate`), on other steps than
those that are predicted. Right afterwards policies × budgets run by turns, `--rounds` times each.
Prints medians of the rounds and errors, model by model; exits with status 1 if an error is above
15%.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
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


def hide_costs(home: str) -> None:
    """Makes `home` the place of caches: the user's, but for costs, which stay as they are."""
    here, there = cache_root(), Path(home) / cache_root().name
    there.mkdir(mode=0o700)
    for kept in here.iterdir() if here.exists() else ():
        if kept.name != "costs":
            (there / kept.name).symlink_to(kept.resolve())
    os.environ["XDG_CACHE_HOME"] = home


def compare(model: str, rounds: int) -> list[dict[str, Any]]:
    """Measures the costs of a model and runs its grid. Returns the lines of a table."""
    print(f"{model}: costs, then {rounds} rounds", flush=True)
    times: dict[tuple, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        found = moejax.ablate({**GRID, "model": model, "repeats": rounds}, f"{directory}/grid")
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
    print(*aligned(COLUMNS, rows), sep="\n", flush=True)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "tests/models/demo"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    watch = ProcessorWatch()
    with tempfile.TemporaryDirectory() as home:
        hide_costs(home)
        rows = [row for model in args.models for row in compare(model, args.rounds)]
    errors = [abs(row["error"]) for row in rows]
    near = sum(error <= MOST for error in errors)
    print(f"{near} of {len(rows)} within {MOST:.0%}; median error {statistics.median(errors):.1%}")
    if (others := watch.others()) is not None:
        print(f"other programs took {others:.0%} of the processors meanwhile")
    return int(near < len(rows))
