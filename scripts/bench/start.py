"""Seconds from the command to its first text, cold and warm, and tokens a second at batch 1.

python -m scripts.bench start [--repeats N] [--expert-budget 25%]

Each run is a process of its own, as a user starts it. Cold: an empty compilation cache. Warm: the
cache that a cold run left. Text is seen where it leaves the process, through a pipe. The phases of
a warm start are those of moejax.engine.statistics.StartTimes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import show

PROMPT = "The old house"


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--model", default="demo", help="as for moejax generate (default: demo)")
    parser.add_argument("--expert-budget", default="25%", help="default: 25%%")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    args = parser.parse_args(arguments)
    positive(args, "repeats")
    cold, warm, rates = [], [], []
    phases: list[dict[str, float]] = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_text(args, cache, 16)[0])
            seconds, stats = first_text(args, cache, 16)
            warm.append(seconds)
            phases.append(stats["time"]["start"])
            rates.append(first_text(args, cache, 512)[1]["tpot_s"]["mean"])
    result = {
        "cold_first_text_s": statistics.median(cold),
        "warm_first_text_s": statistics.median(warm),
        "tokens_per_s": 1 / statistics.median(rates),
        "warm_phases_s": {
            phase: statistics.median(run[phase] for run in phases) for phase in phases[0]
        },
        "repeats": args.repeats,
        "load_average": os.getloadavg()[0],
    }
    shown = ", ".join(
        f"{phase} {seconds:.2f}" for phase, seconds in result["warm_phases_s"].items()
    )
    text = (
        f"first text, cold start  {result['cold_first_text_s']:.2f} s  {spread(cold)}",
        f"first text, warm start  {result['warm_first_text_s']:.2f} s  {spread(warm)}",
        f"  of it, in seconds     {shown}; the rest is imports and the request",
        f"decode at batch 1       {result['tokens_per_s']:.0f} tokens/s",
        f"medians of {args.repeats} processes each, load {result['load_average']:.1f}",
    )
    show(args.json, [result], text)
    return 0


def first_text(args: argparse.Namespace, cache: str, tokens: int) -> tuple[float, dict]:
    """(seconds from starting the command to its first output, its statistics)."""
    command = [sys.executable, "-m", "moejax", "generate", PROMPT, "--model", args.model]
    command += ["--expert-budget", args.expert_budget, "--max-tokens", str(tokens)]
    command += ["--temperature", "0", "--ignore-eos", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - began
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors.decode())
    return seconds, json.loads(errors.decode().splitlines()[-1])


def spread(values: list[float]) -> str:
    return f"({min(values):.2f} to {max(values):.2f})"
