"""An expert op of one row with each version of its weights, beside dense ones.

python -m scripts.cpu versions [--experts 24] [--repeats 25]

The versions and a plain read of memory alternate in one process; a ratio is the median of the
ratios of neighbours, of the clock's seconds and of processor seconds, which other programs disturb
less. The default sizes are OLMoE-1B-7B's; each call takes other experts than the one before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.cases import SIZES, expert_cases, memory_reader, timed
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

COLUMNS = [
    ("op", "{op}"),
    ("MB", "{mb:.1f}"),
    ("ms", "{ms:.2f}"),
    ("GB/s", "{rate:.1f}"),
    ("of memory", "{share:.0%}"),
    ("of dense", "{of_dense:.2f}"),
    ("processor", "{processor:.2f}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name in ("hidden", "width", "experts"):
        parser.add_argument(f"--{name}", type=int, default=SIZES[name], help=f"{SIZES[name]}")
    parser.add_argument("--repeats", type=int, default=25, help="default: 25")
    parser.add_argument("--threads", type=int, default=2, help="that read memory (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    if min(args.hidden, args.width, args.experts, args.repeats, args.threads) < 1:
        return refuse(__name__, "numbers are positive")
    if reason := why_not_cpu():
        return refuse(__name__, reason)
    cases = [case for case in expert_cases(args) if case.name.endswith(", 1 rows")]
    calls = [case.call("cpu") for case in cases]
    clock, processor = np.zeros((2, args.repeats, len(cases)))
    memory = np.zeros(args.repeats)  # seconds per byte
    read = memory_reader(args.threads)
    for call in calls:
        jax.block_until_ready(call(0))
    for i in range(args.repeats):
        for j, call in enumerate(calls):
            before = time.process_time()
            clock[i, j] = timed(lambda call=call, i=i: jax.block_until_ready(call(i + 1)))
            processor[i, j] = time.process_time() - before
        memory[i] = read()
    lines = [
        {
            "op": case.name,
            "mb": case.nbytes / 1e6,
            "ms": 1e3 * np.median(clock[:, j]),
            "rate": case.nbytes / np.median(clock[:, j]) / 1e9,
            "share": np.median(case.nbytes * memory / clock[:, j]),
            "of_dense": np.median(clock[:, j] / clock[:, 0]),
            "processor": np.median(processor[:, j] / processor[:, 0]),
        }
        for j, case in enumerate(cases)
    ]
    if args.json:
        for line in lines:
            print(json.dumps(line | {"isa": instruction_set(), "load": os.getloadavg()[0]}))
        return 0
    print("\n".join(aligned(COLUMNS, lines)))
    rate, load = 1e-9 / np.median(memory), os.getloadavg()[0]
    print(f"memory {rate:.1f} GB/s, {args.threads} threads; {instruction_set()}; load {load:.1f}")
    return 0
