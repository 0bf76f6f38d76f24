"""Predicted decode times beside measured ones, on this machine, which has to be quiet.

    python -m scripts.check predictions [--models demo tests/models/demo] [--rounds 5] [--runs 3]

Costs are measured anew (`moejax calibrate`) before the first round of each model and batch and
after every round, on other steps than those that are predicted. In a round policies × budgets run
by turns, each `runs` times, since a run takes less than a second: its time is their median. A
round's error is that of the mean prediction by the costs before and after it, so that a machine
whose speed drifts is compared with itself. Prints each place's medians over the rounds and the
errors' ends; exits with status 1 if a median error is above 15%.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from host_offload.sizing.cost_model import CostModel
from moejax.costs.measure import measure
from moejax.costs.other_programs import ProcessorWatch
from moejax.evaluate.experiments.bench import EngineBench, engine_bench, loaded_model
from moejax.evaluate.experiments.definition import Cell, read_experiment
from scripts.parts.commands import new_parser
from scripts.parts.text_table import aligned

MOST = 0.15
GRID: dict[str, Any] = {
    "policies": ["lru", "lfu"],
    "budgets": ["25%", "50%", "75%"],
    "prompt_tokens": [64],
    "repeats": 1,
    "output_tokens": 48,
    "temperature": 0.0,
    "modes": ["measured"],
}
PROMPTS = {1: 8, 8: 32}
"""Prompts of a run by batch: some hundred steps. 6 places of a model and batch."""

PLACE = ("policy", "budget", "batch")

COLUMNS = (
    ("model", "{model}"),
    *((name, f"{{{name}}}") for name in PLACE),
    ("measured ms", "{measured:.3f}"),
    ("predicted ms", "{predicted:.3f}"),
    ("error", "{error:+.1%}"),
    ("least", "{least:+.1%}"),
    ("most", "{most:+.1%}"),
)


def compare(model: str, batch: int, rounds: int, runs: int) -> list[dict[str, Any]]:
    """Measures costs and runs, by turns. Returns the lines of a table."""
    grid = read_experiment({**GRID, "model": model, "batch": [batch], "prompts": PROMPTS[batch]})
    ((group, asked),) = grid.runs().items()
    cells = [cell for cell, _ in asked if cell.mode == "measured"]
    whole = dataclasses.replace(grid, budgets=("100%",))
    print(f"{model}, batch {batch}", end=": ", flush=True)
    with tempfile.TemporaryDirectory() as directory, loaded_model(grid, "dense") as loaded:
        traces = Path(directory)
        with (
            engine_bench(whole, group, loaded, traces) as apart,
            engine_bench(grid, group, loaded, traces) as bench,
        ):
            bench.prepare([(cell, 0) for cell in cells])
            runner = apart.engine.runner
            costs, measured = [measure(runner)], []
            for number in range(1, rounds + 1):
                print(number, end=" ", flush=True)
                turns = [[bench.columns(cell)["tpot_p50_s"] for cell in cells] for _ in range(runs)]
                measured.append([*map(statistics.median, zip(*turns, strict=True))])
                costs.append(measure(runner))
            predicted = [predict(bench, cells, model) for model in costs]
    print()
    lines = zip(cells, zip(*measured, strict=True), zip(*predicted, strict=True), strict=True)
    return [
        {"model": model, **{name: getattr(cell, name) for name in PLACE}, **errors(times, told)}
        for cell, times, told in lines
    ]


def predict(bench: EngineBench, cells: Sequence[Cell], costs: CostModel) -> list[float]:
    """Returns the predicted time of a token of each cell."""
    bench.costs = costs
    return [
        bench.columns(dataclasses.replace(cell, mode="predicted"))["tpot_p50_s"] for cell in cells
    ]


def errors(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Returns a place's columns: medians over the rounds, and the errors' least and most.

    - `measured`: seconds in each round.
    - `predicted`: seconds by the costs before the first round and after each.
    """
    told = [statistics.fmean(pair) for pair in pairwise(predicted)]
    found = [each / time - 1 for each, time in zip(told, measured, strict=True)]
    return {
        "measured": 1e3 * statistics.median(measured),
        "predicted": 1e3 * statistics.median(told),
        "error": statistics.median(found),
        "least": min(found),
        "most": max(found),
    }


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "tests/models/demo"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    watch = ProcessorWatch()
    asked = [(model, batch) for model in args.models for batch in PROMPTS]
    rows = [row for each in asked for row in compare(*each, args.rounds, args.runs)]
    print(*aligned(COLUMNS, rows), sep="\n", flush=True)
    wrong = [abs(row["error"]) for row in rows]
    near = sum(error <= MOST for error in wrong)
    print(f"{near} of {len(rows)} within {MOST:.0%}; median error {statistics.median(wrong):.1%}")
    if (others := watch.others()) is not None:
        print(f"other programs took {others:.0%} of the processors meanwhile")
    return int(near < len(rows))
