"""How many references the simulator takes in a second on one core; a reference is one (layer,
expert) pair that a step needs.

python -m scripts.bench simulator [--layers 48 --experts 128 --top-k 8] [--batch 1] [--json]

A made-up trace of the shape (by default Qwen3-30B-A3B's; half of a token's experts are those of the
token before, the rest by Zipf's law) is written to disk and simulated from there, so reading counts
in. `plan` is the general path of policies that are weights, `min` the bound. Each figure is the
median of `repeats`, with the fastest and slowest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import PageUse, StepRecord
from host_offload.policies.eviction.names import PER_LAYER
from host_offload.simulate.bounds import min_transfers, read_references
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, TraceHeader, read_trace
from host_offload.traces.writer import TraceWriter
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

COLUMNS = [
    ("what", "{what}"),
    ("cells", "{cells}"),
    ("M references/s", "{millions:.2f}"),
    ("slowest", "{slowest:.2f}"),
    ("fastest", "{fastest:.2f}"),
    ("µs a step", "{step_us:.0f}"),
]


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
    least = min(args.layers, args.top_k, args.batch, args.steps, args.repeats)
    if least < 1 or args.top_k > args.experts or not 0 <= cells <= args.experts:
        return refuse(__name__, "sizes must be positive and fit the experts")
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
    shown = map(json.dumps, lines) if args.json else aligned(COLUMNS, lines)
    print(*shown, sep="\n")
    return 0


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def made_up(directory: Path, args: argparse.Namespace, cells: int) -> Trace:
    """A trace of decode steps with routing of that shape, the same for the same arguments."""
    rng = np.random.default_rng(0)
    layers, experts, k, rows = args.layers, args.experts, args.top_k, args.batch
    popular = 1 / np.arange(1, experts + 1)
    order = np.argsort(rng.random((layers, experts)), axis=1)
    log_share = np.log(popular / popular.sum())[order]
    header = TraceHeader(
        layers,
        experts,
        k,
        config_digest="",
        spec={
            "hidden": 2048,
            "page_bytes": 1,
            "page_tokens": 16,
            "slots": layers * experts,
            "slot_bytes": 1,
            "shapes": {"blocks": 1},
            "seed": 0,
            "driver": "device",
            "version_bytes": {"dense": 1},
            "cells": [cells] * layers,
        },
        machine={},
        command=sys.argv,
        created="",
    )
    number = np.arange(rows, dtype=np.int32)
    none = np.zeros(layers, np.int32)
    ids = np.zeros((rows, layers, k), np.int16)
    with TraceWriter(directory, header) as writer:
        for step in range(args.steps):
            # Gumbel-top-k: k different experts by their shares; those that stay are ahead of all.
            score = log_share + rng.gumbel(size=(rows, layers, experts))
            if step:
                stays = rng.random((rows, layers, k)) < 0.5
                kept = np.where(stays, np.inf, np.take_along_axis(score, ids.astype(int), 2))
                np.put_along_axis(score, ids.astype(int), kept, 2)
            ids = np.sort(np.argpartition(-score, k - 1, axis=2)[..., :k], axis=2).astype(np.int16)
            writer.append(
                StepRecord(
                    request=number,
                    user=number - rows,
                    position=number + step,
                    phase=np.ones(rows, np.uint8),
                    ids=ids,
                    weights=np.full(ids.shape, 1 / k, np.float32),
                    number=step,
                    kind="decode",
                    start_s=step * 1.0,
                    read_s=step + 1.5,
                    seconds=1.0,
                    rows=rows,
                    compiled=False,
                    hits=none,
                    fills=none,
                    read_through=none,
                    waves=np.ones(layers, np.int16),
                    missed=np.zeros((layers, experts), bool),
                    bytes=np.zeros(3, np.int64),
                    use=np.zeros(len(dataclasses.fields(PageUse)), np.int64),
                    finished=(),
                )
            )
    return read_trace(directory)
