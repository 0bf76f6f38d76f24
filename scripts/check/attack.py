"""Hostile requests, lines, files and interrupts against a model, every invariant checked.

python -m scripts.check attack --minutes 60 [--seed 0] [--only params,lines] [--report FILE.jsonl]
python -m scripts.check attack --seed 0 --case 1234    # one case again

A case is an attack of one kind (scripts/attacks), drawn from the seed and the case's number and
nothing else. It runs in a process of its own with a model under random budgets and policies, which
is watched from outside: no call may take more than 10 s, no process may die or need more than
twice its normal memory. After each case the engine is idle and whole, a known request gives the
bits that it gave alone, every line of a file has one result, and no temporary file is left. What
breaks is printed with the command that runs the case again, and the campaign goes on; it exits
with status 1 if anything broke.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from moejax import UserError
from scripts.attacks.engine import Known
from scripts.attacks.scene import LIMIT, Fault
from scripts.attacks.worker import KINDS, Worker, kind_of
from scripts.parts.commands import new_parser, refuse

RESTART = ("died", "hung", "engine", "bits")
"""Faults after which the process is not to be trusted."""


@dataclasses.dataclass
class Campaign:
    """Cases in worker processes, one after the other. prepare: see Worker."""

    seed: int
    directory: Path
    prepare: Callable[[], None] | None = None
    known: Known | None = None
    workers: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """What cases did, by "kind: what"."""
    _worker: Worker | None = None

    def run(self, number: int) -> list[Fault]:
        """What broke in a case, each thing once."""
        if self._worker is None:
            self.workers += 1
            place = self.directory / f"worker-{self.workers}"
            self._worker = Worker(self.known, place, self.prepare)
        faults = self._worker.run(self.seed, number)
        self.known = self._worker.known
        kind, did = kind_of(self.seed, number), self._worker.counts
        self.counts.update({f"{kind}: {what}": n for what, n in did.items()})
        did.clear()
        if any(fault.what in RESTART for fault in faults):
            self.close()
        return list(dict.fromkeys(faults))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def numbers(seed: int, only: Collection[str]) -> Iterator[int]:
    """The cases of those kinds, in order."""
    return (n for n in itertools.count() if kind_of(seed, n) in only)


def run(
    campaign: Campaign,
    cases: Iterator[int],
    minutes: float,
    report: IO[str] | None,
    console: Console,
) -> Counter[tuple[str, str]]:
    """Runs cases until the time is over; returns how often what was: (kind, "cases" or a fault)."""
    counts, deadline = Counter[tuple[str, str]](), None
    for number in cases:
        kind = kind_of(campaign.seed, number)
        began = time.perf_counter()
        faults = campaign.run(number)
        # The first start may compile, which is no part of the campaign.
        deadline = deadline or time.perf_counter() + 60 * minutes
        counts[kind, "cases"] += 1
        counts[kind, "failed"] += bool(faults)
        again = f"python -m scripts.check attack --seed {campaign.seed} --case {number}"
        for fault in faults:
            counts[kind, fault.what] += 1
            console.print(f"✗ {kind}: {fault.what}: {fault.text}\n  {again}", markup=False)
        if report is not None:
            each = [dataclasses.asdict(fault) for fault in faults]
            seconds = round(time.perf_counter() - began, 3)
            entry = {"case": number, "kind": kind, "seconds": seconds, "faults": each}
            print(json.dumps({"seed": campaign.seed, **entry}), file=report, flush=True)
        if time.perf_counter() > deadline:
            break
    return counts


def table(counts: Counter[tuple[str, str]]) -> Table:
    found = Table("kind", "cases", "failures", "what")
    for kind in KINDS:
        if cases := counts[kind, "cases"]:
            what = {w: n for (k, w), n in counts.items() if k == kind}
            what = {w: n for w, n in what.items() if w not in ("cases", "failed")}
            shown = ", ".join(f"{n} {w}" for w, n in sorted(what.items()))
            found.add_row(kind, str(cases), str(counts[kind, "failed"]), shown)
    return found


def main(arguments: Sequence[str] | None = None, prepare: Callable[[], None] | None = None) -> int:
    args = _parser().parse_args(arguments)
    only = set(args.only.split(",")) if args.only else set(KINDS)
    if unknown := only - set(KINDS):
        return refuse(__name__, f"no kind {min(unknown)!r}; the kinds: {', '.join(KINDS)}")
    if args.limit_s is not None:
        os.environ[LIMIT] = str(args.limit_s)  # for the workers too
    console = Console(soft_wrap=True)
    cases = iter(args.case) if args.case else numbers(args.seed, only)
    with tempfile.TemporaryDirectory(prefix="moejax-attack-") as name:
        campaign = Campaign(args.seed, Path(name), prepare)
        try:
            if args.report is None:
                counts = run(campaign, cases, args.minutes, None, console)
            else:
                with open(args.report, "w") as report:
                    counts = run(campaign, cases, args.minutes, report, console)
        except (OSError, RuntimeError, UserError) as error:
            return refuse(__name__, error)
        finally:
            campaign.close()
    console.print(table(counts))
    for what, n in sorted(campaign.counts.items()):
        console.print(f"{what}: {n}", markup=False)
    failed = sum(n for (_, what), n in counts.items() if what == "failed")
    print(f"{failed} of {sum(counts[k, 'cases'] for k in KINDS)} cases broke something")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of everything random (default: 0)")
    add("--minutes", type=float, default=5.0, help="how long (default: %(default)s)")
    add(
        "--limit-s",
        type=float,
        metavar="S",
        help="a call that takes longer hangs (default: 10, and more where other programs run)",
    )
    add("--case", type=int, nargs="+", metavar="N", help="run these only")
    add("--only", metavar="KIND,...", help=f"of {', '.join(KINDS)} (default: all)")
    add("--report", metavar="FILE.jsonl", help="a line of JSON for each case")
    return parser
