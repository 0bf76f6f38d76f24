"""From how many tokens a load of an expert is done before the CPU (PreScope, section 2.3).

python -m scripts.policies crossover [--hidden 2048] [--width 768] [--threads 1,2] [--link 46.8GB/s]
    [--cores 16] [--memory 25GB/s,100GB/s,...] [--json]

C and β of t_c(m) = β·m + C are fitted here to the native op over random experts of these sizes,
bfloat16, where a store has them, on so many threads; each row's seconds with --json. A load takes
its bytes at --link, one in a row of them: 46.8 GB/s is what ten copies of 9.4 MiB in flight had on
an H200 (../shared/DESIGN.md, section 6). The crossover is (t_io − C) / β tokens; 0: a load is
always first.

Below, for a machine that is not here: --cores of it, each as fast as one here (β over cores), and
weights that come at --memory (C is their bytes at that rate, or this machine's over cores where
that is more). A prediction: what such a machine's memory gives must be measured there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.costs.in_place import ROWS, in_place_seconds
from moejax.errors import UserError
from moejax.sizes import parse_rate
from moejax.step.context import ExpertContext
from pallas_kernels import resolve_ops
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

LAYERS, EXPERTS = 3, 8
"""Sizes of the store: more than caches hold, for experts of some MiB."""

COLUMNS = [
    ("machine", "{machine}"),
    ("C us", "{startup_us:.1f}"),
    ("β us", "{per_token_us:.2f}"),
    ("load us", "{load_us:.1f}"),
    ("a load is first from, tokens", "{tokens:.0f}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        found = _found(args)
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(*aligned(COLUMNS, found), sep="\n")
    return 0


def _found(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each machine: here, and those predicted."""
    nbytes = 3 * args.hidden * args.width * 2
    load = nbytes / parse_rate(args.link)
    found, one_core = [], np.zeros(2)
    for threads in (int(text) for text in args.threads.split(",")):
        seconds = measured(args.hidden, args.width, threads)
        slope, start = np.maximum(np.polyfit(ROWS, seconds, 1), 0.0)
        if not found:  # by which other machines go
            one_core = np.array([start, slope]) * threads
        each = dict(zip(map(str, ROWS), (1e6 * seconds).tolist(), strict=True))
        machine = f"here, {threads} threads"
        found.append(_row(machine, start, slope, load) | {"us_by_rows": each})
    for text in args.memory.split(","):
        start = max(nbytes / parse_rate(text), one_core[0] / args.cores)
        machine = f"predicted: {args.cores} cores, {text}"
        found.append(_row(machine, start, one_core[1] / args.cores, load))
    return found


def _row(machine: str, startup: float, per_token: float, load: float) -> dict[str, Any]:
    tokens = max(load - startup, 0.0) / per_token if per_token else float("inf")
    times = {"startup_us": startup, "per_token_us": per_token, "load_us": load}
    return {"machine": machine, **{n: 1e6 * s for n, s in times.items()}, "tokens": tokens}


def measured(hidden: int, width: int, threads: int) -> np.ndarray:
    """float64[len(ROWS)]: seconds of an expert [3·width, hidden] of so many rows."""
    ops = resolve_ops({"expert_ffn": "cpu"}, dtype="bfloat16")
    random = np.random.default_rng(0).normal(0, 0.02, (EXPERTS, 3 * width, hidden))
    layer = random.astype(jnp.bfloat16).view(np.uint16)
    store = jax.device_put(np.stack([layer] * LAYERS))
    context = ExpertContext(
        stores=(store,), ops=ops, activation="silu", row_tile=16, threads=threads
    )
    return in_place_seconds((store,), context, jnp.bfloat16)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", default="1,2", metavar="N,…")
    parser.add_argument("--link", default="46.8GB/s", metavar="RATE")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--memory", default="25GB/s,50GB/s,100GB/s,200GB/s", metavar="RATE,…")
    parser.add_argument("--json", action="store_true")
    return parser
