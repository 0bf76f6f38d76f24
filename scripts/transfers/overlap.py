"""Decode steps whose experts pass a link as fast as they compute: in the step, or ahead of it.

python -m scripts.transfers overlap [--rounds 9] [--layers 2] [--experts 32] [--json]

Random weights of OLMoE-1B-7B's layers, batch 1, routing forced: of a layer's 8 active experts some
stay and the others, 8 over all layers, change with every step. First the step is timed with
everything there; the link gets the rate at which a step's changes take as long. Then blocks of
steps in turn, each round a pair with each other:

  compute   nothing changes, no queue
  queue     nothing changes, with the queue: its cost
  copied    nothing changes, beside a copy at the link's rate for which nobody waits
  ahead     everything comes by an oracle's prefetch in the step before
  in step   everything is a demand

Printed are medians of the rounds' ratios with their quartiles: queue / compute (bar: 1.03), ahead /
max(copied, link) (bar: 1.10), in step / (compute + link), which says that transfers within a step
are paid beside compute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import numpy as np

from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from moejax.checkpoints.random_model import random_model
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.step.programs import STAGES
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.parts.commands import new_parser, refuse
from scripts.transfers.changing_steps import add_sizes, check_sizes, make

PIECES = 200
"""Pieces of a copy for which nobody waits, more than any block takes."""


class Copy:
    """A copy at a rate for which nobody waits."""

    def __init__(self, rate: float, nbytes: int):
        self.queue = NativeQueue(rate=rate)
        self.queue.keep_settled(False)
        self.source, self.target = (np.ones(nbytes, np.uint8) for _ in range(2))

    def during(self, work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        tickets = [self._submit(cell) for cell in range(PIECES)]
        try:
            found = work()
            if not self.queue.totals().flying:
                raise RuntimeError("the copy ended before the steps")
            return found
        finally:
            for ticket in tickets:
                self.queue.cancel(ticket)

    def _submit(self, cell: int) -> int:
        source = Source(address=self.source.ctypes.data)
        load = Load((self.source.nbytes,), source, self.target.ctypes.data)
        return self.queue.submit(Transfer(0, cell, 0, cell, "copy"), load)


def measure(args: argparse.Namespace) -> dict:
    changing = STAGES // args.layers
    fields = OLMOE | {"num_hidden_layers": args.layers, "num_experts": args.experts}
    config = parse_config(fields | {"vocab_size": 1024, "eos_token_id": 1})
    loaded = with_versions(random_model(config, device=select_device()), ["dense"])
    plain = make(loaded, args, changing)
    still = [plain.block(args.steps, changes=False, ahead=False)[0] for _ in range(3)]
    moved = changing * args.layers * plain.engine.runner.link_bytes[0]
    rate = moved / float(np.median(still))
    linked = make(loaded, args, changing, rate)
    copy = Copy(rate, 1 << 28)
    link = moved / rate
    rows: list[dict[str, float]] = []
    for _ in range(args.rounds):
        arms = {
            "compute": plain.block(args.steps, changes=False, ahead=False),
            "queue": linked.block(args.steps, changes=False, ahead=False),
            "ahead": linked.block(args.steps, changes=True, ahead=True),
            "in step": linked.block(args.steps, changes=True, ahead=False),
        }
        arms["copied"] = copy.during(lambda: plain.block(args.steps, changes=False, ahead=False))
        wall = {name: seconds for name, (seconds, _) in arms.items()}
        cpu = {name: seconds for name, (_, seconds) in arms.items()}
        rows.append(
            wall
            | {
                "queue / compute": wall["queue"] / wall["compute"],
                "queue / compute, processor": cpu["queue"] / cpu["compute"],
                "copied / compute": wall["copied"] / wall["compute"],
                "ahead / max(copied, link)": wall["ahead"] / max(wall["copied"], link),
                "ahead / (compute + link)": wall["ahead"] / (wall["compute"] + link),
                "in step / (compute + link)": wall["in step"] / (wall["compute"] + link),
            }
        )
    found = {
        name: np.percentile([row[name] for row in rows], (50, 25, 75)).tolist() for name in rows[0]
    }
    return {"rate": rate, "link": link, "moved": moved, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add_sizes(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(arguments)
    try:
        check_sizes(args)
        found = measure(args)
    except UserError as error:
        return refuse(__name__, error)
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"link {found['rate'] / 1e9:.2f} GB/s: {found['moved'] / 1e6:.0f} MB a step, "
        f"{found['link'] * 1e3:.2f} ms"
    )
    for name, value in found.items():
        if isinstance(value, list):
            scale, unit = (1, "") if "/" in name else (1e3, " ms")
            middle, low, high = (v * scale for v in value)
            print(f"{name:<28} {middle:8.3f}{unit}  ({low:.3f} … {high:.3f})")
    return 0
