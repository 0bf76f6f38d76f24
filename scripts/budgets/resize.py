"""Budgets that move while requests run: what a resize adds to a step, and what it is worth.

NPROC=1 python -m scripts.budgets resize steps [--resizes 200] [--shape S --layers N]
python -m scripts.budgets resize bursts [--seeds 20]
python -m scripts.budgets resize rule [--seeds 5] [--miss-ms 4]

`steps`: sequences decode while slots go from KV to experts and back, a third of what is beside
their KV at once, a move every few steps; the time between the results of two steps, of steps that a
resize touches and of the others. Rounds with resizes and rounds of the same prompts with either
split held take turns; tokens must be the same in all. Goal: p99 of a resize's steps, over at least
--resizes of them, ≤ 1.2 × the median of the run: decode steps of a full batch, every single one.
What rounds without resizes have says what the machine and the misses alone add. Timed on this
machine, by the engine's own loop. NPROC=1 keeps XLA on one thread of a CPU: handing parts of a step
from thread to thread takes longer and longest now and then. --shape demo --layers 48 has longer
steps than the model demo, random weights. Minutes on two quiet cores.

`bursts`: conversations with bursty arrivals through the engine, embedded model, live resize against
fixed splits, paired over arrival seeds. Steps, misses, KV moved and requests are the engine's own;
time is priced (--decode-ms, --prefill-ms, --miss-ms, --page-ms: stated, by default those of a
large model over PCIe), so throughput is predicted, not measured. For each seed the fixed split that
is best on the other seeds is the one to compare with; the best in hindsight is shown too. mv_wsa
knows nothing and starts at the middle one of --caps; mv_wsa-trace starts as budget=mv_wsa=TRACE
with resize=mv_wsa does, by a trace of another seed. Its parameters were chosen on seeds 100 to 111.
Tokens must be the same with all of them, and no turn unserved that a fixed split serves.
Goal: lower 95% bound of the ratio ≥ 0.98. Ten minutes on two busy cores.

`rule`: should the line move by itself where nobody said anything? mv_wsa from the split that a
start has by the rule (an eighth or one sequence for KV), cold, against that split held.
Conversations and batch jobs, priced as in `bursts`, so predicted; policies cost nothing in it.
Minutes a memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from host_offload.memory.budget import BudgetError
from moejax import UserError
from scripts.budgets import bursts as resize_bursts
from scripts.budgets import rule as resize_rule
from scripts.budgets import steps as resize_steps
from scripts.parts.commands import new_parser, refuse

MODES = {"steps": resize_steps.steps, "bursts": resize_bursts.bursts, "rule": resize_rule.rule}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        found = list(MODES[args.what](args))
    except (UserError, BudgetError) as error:
        return refuse(__name__, error)
    for line in found:
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    modes = parser.add_subparsers(dest="what", required=True)
    one = modes.add_parser("steps")
    two = modes.add_parser("bursts")
    three = modes.add_parser("rule")
    for mode in (one, two, three):
        mode.add_argument("--model", default="demo", help="(default: demo)")
        mode.add_argument("--json", action="store_true", help="JSON lines, no table")
    resize_steps.add_arguments(one)
    resize_bursts.add_arguments(two)
    resize_rule.add_arguments(three)
    return parser
