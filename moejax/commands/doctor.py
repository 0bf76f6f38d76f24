"""``moejax doctor`` shows what this machine has, what will run on it, and what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json

from moejax.commands import add_command

_DESCRIPTION = """\
What moejax finds on this machine: GPU, driver, versions of jax, memory, what pinned memory and link
allow, and which implementation of each op will run. What is wrong is said with the command that
mends it; exit status 1 then. A missing GPU is no fault: all runs on the CPU.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "say what GPU, driver and jax there are, and what is wrong"
    doctor = add_command(commands, "doctor", _run, text, description=_DESCRIPTION)
    doctor.add_argument("--json", action="store_true", help="one JSON object")


def _run(args: argparse.Namespace) -> int:
    from moejax.evaluate.diagnosis import describe, judge, look, next_step, what_runs

    machine = look()
    problems = judge(machine)
    if args.json:
        found = {
            "machine": dataclasses.asdict(machine),
            "runs": what_runs(machine),
            "problems": [dataclasses.asdict(problem) for problem in problems],
            "next": next_step(machine, problems),
        }
        print(json.dumps(found, indent=1))
        return 1 if problems else 0
    lines = describe(machine)
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")
    for problem in problems:
        print(f"\nwrong: {problem.what}\nmend:  {problem.mend}")
    print(f"\n{next_step(machine, problems)}")
    return 1 if problems else 0
