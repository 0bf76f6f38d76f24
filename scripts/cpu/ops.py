"""Each native CPU op beside XLA's, and the bytes it reads beside the rate of memory.

python -m scripts.cpu ops [--only linear,experts,attention] [--repeats 15] [--threads 2]
python -m scripts.cpu ops --against CHECKOUT [--repeats 25]

The default sizes are OLMoE-1B-7B's. Memory larger than the caches is read in turn, so that weights
come from memory. An op of each implementation and a plain read of memory alternate; a ratio is the
median of the ratios of neighbours, so that other programs disturb both. Times hold the dispatch of
one jitted call. "processor" is the ratio of processor seconds, which other programs disturb less.

--against: the native ops of two checkouts, each with its own library, in two processes that take
turns call by call, so that a machine whose speed changes has the same speed for both: medians and
quartiles of the pairs' ratios, and whether the results have the same bits. MOEJAX_CPU_ISA is for
both. Both have to be built (`python -m pallas_kernels.cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.cases import CASES, HEAD_DIM, SIZES, Case, memory_reader, timed
from scripts.cpu.engines import turns
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

AGAINST = [
    ("op", "{op}"),
    ("theirs ms", "{their_ms:.2f}"),
    ("ours ms", "{our_ms:.2f}"),
    ("ours / theirs", "{ratio:.3f}"),
    ("quartiles", "{low:.3f} to {high:.3f}"),
    ("bits", "{bits}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--only", default=",".join(CASES), help="default: all")
    parser.add_argument("--repeats", type=int, default=15, help="default: 15")
    parser.add_argument("--threads", type=int, default=2, help="that read memory (default: 2)")
    parser.add_argument("--against", metavar="CHECKOUT", type=Path, help="instead of XLA's ops")
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
    if args.against is not None:
        if not (args.against / "scripts").is_dir():
            return refuse(__name__, f"{args.against} is no checkout: it has no folder scripts")
        try:
            lines = against(args)
        except RuntimeError as error:
            return refuse(__name__, str(error))
        print("\n".join(map(json.dumps, lines) if args.json else aligned(AGAINST, lines)))
        return 0
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


def against(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each op of two checkouts. Raises RuntimeError where one of them ends early."""
    asked = json.dumps({name: getattr(args, name) for name in (*SIZES, "only")})
    ours = Path(__file__).resolve().parents[2]
    sides = [_Side(tree, asked) for tree in (args.against.resolve(), ours)]
    try:
        cases = [side.cases() for side in sides]
        return [
            {"op": name, **_turns(sides, j, args.repeats), "bits": "same" if a == b else "OTHER"}
            for j, ((name, _, a), (_, _, b)) in enumerate(zip(*cases, strict=True))
        ]
    finally:
        for side in sides:
            side.process.kill()
            side.process.communicate()  # closes its pipes


class _Side:
    """A checkout's process, which computes when it is told to."""

    def __init__(self, tree: Path, asked: str):
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, turns.__file__, asked],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def cases(self) -> list[tuple[str, int, str]]:
        """(name, bytes, digest of the first result) of each."""
        return [json.loads(line) for line in iter(self._line, "ready")]

    def seconds(self, case: int, call: int) -> float:
        assert self.process.stdin is not None
        print(case, call, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline().strip():
            return line
        raise RuntimeError(f"the ops of {self.tree} ended early; what they said is above")


def _turns(sides: Sequence[_Side], case: int, repeats: int) -> dict[str, float]:
    seconds = np.zeros((repeats, 2))
    for i in range(repeats):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            seconds[i, side] = sides[side].seconds(case, i + 1)
    low, ratio, high = np.percentile(seconds[:, 1] / seconds[:, 0], (25, 50, 75))
    theirs, ours = 1e3 * np.median(seconds, axis=0)
    return {"their_ms": theirs, "our_ms": ours, "ratio": ratio, "low": low, "high": high}
