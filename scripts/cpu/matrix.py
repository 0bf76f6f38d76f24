"""The native CPU ops at prefill's sizes beside torch's (oneDNN's) products of the same matrices.

python -m scripts.cpu matrix [--tokens 512] [--repeats 9] [--threads 2]

Rates are of multiplications and additions. Each line's op and torch's products, in bfloat16 and in
float32, alternate in one process with as many threads each; a ratio is the median of the ratios of
neighbours. float32's rate says what the machine's multipliers give. torch multiplies each expert's
rows with its three matrices and computes nothing between; the op also routes, rounds and activates.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax import UserError
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.cases import normal, timed
from scripts.cpu.products import SIZES, Case, expert_case, linear_case, torch
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

BAR = 0.6
"""The least share of torch's rate. float32's is said too: on many CPUs torch has no fast products
of bfloat16."""
DTYPES = ("bfloat16", "float32")
PAUSE = 0.005
"""Seconds between two calls, in which the threads of the one before stop waiting for more."""

COLUMNS = [
    ("product", "{op}"),
    ("cpu GFLOP/s", "{cpu:.1f}"),
    ("torch bfloat16", "{bfloat16:.1f}"),
    ("float32", "{float32:.1f}"),
    ("cpu / torch bfloat16", "{of_bfloat16:.2f}"),
    ("/ float32", "{of_float32:.2f}"),
]


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--repeats", type=int, default=9, help="default: 9")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    positive(args, *SIZES, "repeats", "threads")
    if reason := why_not_cpu():
        raise UserError(reason)
    if torch is None:
        raise UserError("there is no torch here to compare with")
    torch.set_num_threads(args.threads)
    about = {"isa": instruction_set(), "load": os.getloadavg()[0]}
    lines = [measured(case, args.repeats) | about for case in cases(args)]
    said = f"torch {torch.__version__}, {args.threads} threads; {{isa}}; load {{load:.1f}}"
    bars = [verdict(dtype, [line[f"of_{dtype}"] for line in lines]) for dtype in DTYPES]
    show(args.json, lines, [*aligned(COLUMNS, lines), said.format(**about), *bars])
    return 0


def verdict(dtype: str, ratios: Sequence[float]) -> str:
    said = "met" if min(ratios) >= BAR else "missed"
    return f"bar, at least {BAR:.0%} of torch's {dtype} rate: {said} (least {min(ratios):.0%})"


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    calls = {"cpu": case.cpu}
    calls |= {name: case.products(getattr(torch, name)) for name in DTYPES}
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            time.sleep(PAUSE)
            seconds[name].append(timed(call))
    cpu, *others = (np.array(seconds[name]) for name in calls)
    rates = {name: case.operations / np.median(seconds[name]) / 1e9 for name in calls}
    ratios = [float(np.median(other / cpu)) for other in others]
    return {"op": case.name, **rates, "of_bfloat16": ratios[0], "of_float32": ratios[1]}


def cases(args: argparse.Namespace) -> Iterator[Case]:
    x = normal((args.tokens, args.hidden), "bfloat16")
    yield linear_case(args, x)
    yield expert_case(args, x)
