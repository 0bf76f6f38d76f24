"""How many references the simulator takes in a second on one core; a reference is one (layer,
expert) pair that a step needs.

python -m scripts.bench simulator [--layers 48 --experts 128 --top-k 8] [--batch 1] [--json]

A generated trace of the shape (by default Qwen3-30B-A3B's, with its statistics) is written to disk
and simulated from there, so reading counts in. `plan` is the general path of policies that are
weights, `min` the bound. Each figure is the median of `repeats`, with the fastest and slowest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from host_offload.policies.eviction.names import PER_LAYER
from host_offload.simulate.bounds import min_transfers, read_references
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, read_trace
from moejax import UserError
from moejax.traces.generated import write_generated_trace
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

COLUMNS = [
    ("what", "{what}"),
    ("cells", "{cells}"),
    ("M references/s", "{millions:.2f}"),
    ("slowest", "{slowest:.2f}"),
    ("fastest", "{fastest:.2f}"),
    ("µs a step", "{step_us:.0f}"),
]


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name, value in (("layers", 48), ("experts", 128), ("top-k", 8), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--steps", type=int, default=1000, help="default: 1000")
    parser.add_argument("--cells", type=int, help="of a layer (default: half of the experts)")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    cells = args.experts // 2 if args.cells is None else args.cells
    positive(args, "layers", "top_k", "batch", "steps", "repeats")
    if args.top_k > args.experts or not 0 <= cells <= args.experts:
        raise UserError("--top-k and --cells must fit the experts")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        trace = made_up(Path(directory) / "trace", args, cells)
        references = read_references(trace)
        runs: dict[str, Callable[[], Any]] = {
            name: lambda name=name: simulate(trace, eviction=name) for name in PER_LAYER
        }
        runs["lru, plan"] = lambda: simulate(trace, eviction="lru", fast=False)
        if (references.largest <= cells).all():
            runs["min"] = lambda: min_transfers(read_references(trace), cells)
        for what, run in runs.items():
            seconds = sorted(timed(run) for _ in range(args.repeats))
            rates = [len(references.step) / s / 1e6 for s in seconds]
            median = seconds[len(seconds) // 2]
            lines.append(
                {
                    "what": what,
                    "cells": cells,
                    "references": len(references.step),
                    "steps": args.steps,
                    "millions": len(references.step) / median / 1e6,
                    "slowest": rates[-1],
                    "fastest": rates[0],
                    "step_us": median / args.steps * 1e6,
                }
            )
    show(args.json, lines, aligned(COLUMNS, lines))
    return 0


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def made_up(directory: Path, args: argparse.Namespace, cells: int) -> Trace:
    """A trace of decode steps, the same for the same arguments."""
    about = {
        "hidden": 2048,
        "page_bytes": 1,
        "page_tokens": 16,
        "slots": args.layers * args.experts,
        "slot_bytes": 1,
        "shapes": {"blocks": 1},
        "driver": "device",
        "version_bytes": {"dense": 1},
        "cells": [cells] * args.layers,
    }
    write_generated_trace(
        directory,
        "qwen3-like",
        layers=args.layers,
        experts=args.experts,
        top_k=args.top_k,
        sequences=args.batch,
        tokens=args.steps,
        about=about,
    )
    return read_trace(directory)
