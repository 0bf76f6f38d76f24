"""Each native CPU op beside XLA's, and the bytes it reads beside the rate of memory.

python -m scripts.cpu ops [--only linear,experts,attention] [--repeats 15] [--threads 2]

The default sizes are OLMoE-1B-7B's. Memory larger than the caches is read in turn, so that weights
come from memory. An op of each implementation and a plain read of memory alternate; a ratio is the
median of the ratios of neighbours, so that other programs disturb both. Times hold the dispatch of
one jitted call. "processor" is the ratio of processor seconds, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.cases import CASES, HEAD_DIM, SIZES, Case, memory_reader, timed
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

COLUMNS = [
    ("op", "{op}"),
    ("MB", "{mb:.1f}"),
    ("xla ms", "{xla_ms:.2f}"),
    ("cpu ms", "{cpu_ms:.2f}"),
    ("xla / cpu", "{speedup:.2f}"),
    ("processor", "{processor:.2f}"),
    ("cpu GB/s", "{rate:.1f}"),
    ("of memory", "{share:.0%}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--only", default=",".join(CASES), help="default: all")
    parser.add_argument("--repeats", type=int, default=15, help="default: 15")
    parser.add_argument("--threads", type=int, default=2, help="that read memory (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    least = min(getattr(args, name) for name in (*SIZES, "repeats", "threads"))
    if not set(names) <= CASES.keys() or least < 1 or args.hidden % HEAD_DIM or args.context % 16:
        return refuse(
            __name__,
            f"cases are {', '.join(CASES)}; numbers are positive, --hidden whole heads of "
            f"{HEAD_DIM}, --context whole blocks of 16",
        )
    if reason := why_not_cpu():
        return refuse(__name__, reason)
    lines = [measured(case, args) for name in names for case in CASES[name](args)]
    if args.json:
        for line in lines:
            print(json.dumps(line | {"isa": instruction_set(), "load": os.getloadavg()[0]}))
        return 0
    print("\n".join(aligned(COLUMNS, lines)))
    memory, load = np.median([line["memory"] for line in lines]), os.getloadavg()[0]
    print(f"memory {memory:.1f} GB/s, {args.threads} threads; {instruction_set()}; load {load:.1f}")
    return 0


def measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    calls = {"xla": case.call("xla"), "cpu": case.call("cpu")}
    for call in calls.values():
        jax.block_until_ready(call(0))
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "memory")}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    read = memory_reader(args.threads)
    for i in range(args.repeats):
        for name, call in calls.items():
            before = time.process_time()
            seconds[name].append(timed(lambda call=call, i=i: jax.block_until_ready(call(i + 1))))
            processor[name].append(time.process_time() - before)
        seconds["memory"].append(read())
    xla, cpu, memory = (np.array(seconds[name]) for name in seconds)  # memory: s per byte
    return {
        "op": case.name,
        "mb": case.nbytes / 1e6,
        "xla_ms": 1e3 * np.median(xla),
        "cpu_ms": 1e3 * np.median(cpu),
        "speedup": np.median(xla / cpu),
        "processor": np.median(np.divide(processor["xla"], processor["cpu"])),
        "rate": case.nbytes / np.median(cpu) / 1e9,
        "share": np.median(case.nbytes * memory / cpu),
        "memory": 1e-9 / np.median(memory),
    }
