"""Decode steps whose experts pass a link as fast as they compute: in the step, or ahead of it.

python -m scripts.transfers overlap [--rounds 9] [--layers 2] [--experts 32] [--file DIR] [--json]

Random weights of OLMoE-1B-7B's layers, batch 1, routing forced: of a layer's 8 active experts some
stay and the others, 8 over all layers, change with every step. First the step is timed with
everything there; the link gets the rate at which a step's changes take as long. Then blocks of
steps in turn, each round a pair with each other:

  compute   nothing changes, no queue
  queue     nothing changes, with the queue: its cost
  beside    nothing changes, beside a copy of 2 GB/s for which nobody waits
  copied    the same at the link's rate; with --file reads as fast as they go, checksums and all
  ahead     everything comes by an oracle's prefetch in the step before
  in step   everything is a demand

With --file experts stay in a converted checkpoint, which is written into DIR once (3.2 GB of 8
layers), and the disk is the link, as fast as it goes: its rate is that of plain reads in each
round. Take the layers with which compute and disk are about equal; 8 layers have four times the
compute of 2 for the same bytes.

Printed are medians of the rounds' ratios with their quartiles: queue / compute (bar: 1.03), beside
/ compute (1.10), ahead / max(copied, link) (1.10 from memory, 1.20 from a file), in step /
max(copied, link) (1.30), and in step / (compute + link), which says that transfers within a step
are paid beside compute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from host_offload.memory.store import RecordFiles
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import random_model
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.models.config import parse_config
from moejax.step.programs import STAGES
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.disk.plain_reads import read_rate
from scripts.disk.random_converted import written
from scripts.parts.commands import new_parser, refusing
from scripts.transfers.changing_steps import add_sizes, check_sizes, make

PIECES, ROOM = 800, 32
"""Pieces of a copy for which nobody waits, more than any block takes; most places that they go to,
each of one record: a thread that lags may still write when its place is written again."""

PIECE = 1 << 26
"""Bytes of one from memory; of files they are whole."""

BESIDE = 2e9
"""Bytes a second of the copy that is to slow compute by a tenth at most."""


class Copy:
    """A copy at a rate for which nobody waits, from memory or of whole files."""

    def __init__(self, rate: float, nbytes: int, files: RecordFiles | None = None):
        self.queue = NativeQueue(rate=rate, threads=4 if files else 2)
        self.queue.keep_settled(False)
        self.nbytes = nbytes
        if files is None:
            source = np.ones(nbytes, np.uint8)
            self.kept, self.sources = source, [Source(address=source.ctypes.data)]
        else:
            paths = [path for layer in files.paths for path in layer][:ROOM]
            sums = [""] * len(paths)
            if files.verify and files.crcs is not None:
                sums = [f"{value:08x}" for value in files.crcs.ravel()[:ROOM].tolist()]
            self.sources = [Source(path=p, checksum=c) for p, c in zip(paths, sums, strict=True)]
        self.target = np.ones((len(self.sources), nbytes), np.uint8)

    def during(self, work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        tickets = [self._submit(cell) for cell in range(PIECES)]
        try:
            found = work()
            totals = self.queue.totals()
            if totals.failed or not totals.flying:
                raise RuntimeError(f"the copy failed, or ended before the steps: {totals}")
            return found
        finally:
            for ticket in tickets:
                self.queue.cancel(ticket)

    def _submit(self, cell: int) -> int:
        source = self.sources[cell % len(self.sources)]
        load = Load((self.nbytes,), source, self.target[cell % len(self.sources)].ctypes.data)
        return self.queue.submit(Transfer(0, cell, 0, cell, "copy"), load)


def model(args: argparse.Namespace) -> LoadedModel:
    """The weights, or with --file a checkpoint of them whose experts stay there."""
    fields = OLMOE | {"num_hidden_layers": args.layers, "num_experts": args.experts}
    raw = fields | {"vocab_size": 1024, "eos_token_id": 1}
    if args.file is None:
        loaded = random_model(parse_config(raw), device=select_device())
        return with_versions(loaded, ["dense"])
    directory = written(args.file, f"overlap-{args.layers}-{args.experts}", raw)
    return load_checkpoint(directory, in_files=True, verify_reads=not args.no_verify_reads)


def measure(args: argparse.Namespace) -> dict:
    changing, loaded = STAGES // args.layers, model(args)
    files = loaded.store.files.get("dense")
    plain = make(loaded, args, changing)
    still = [plain.block(args.steps, changes=False, ahead=False)[0] for _ in range(3)]
    record = plain.engine.runner.link_bytes[0]
    moved = changing * args.layers * record
    rate = moved / float(np.median(still))
    linked = plain if files else make(loaded, args, changing, rate)
    copy = Copy(0, record, files) if files else Copy(rate, PIECE)
    beside = Copy(BESIDE, PIECE)
    link = moved / rate
    rows: list[dict[str, float]] = []
    for _ in range(args.rounds):
        arms = {
            "compute": plain.block(args.steps, changes=False, ahead=False),
            "queue": linked.block(args.steps, changes=False, ahead=False),
            "ahead": linked.block(args.steps, changes=True, ahead=True),
            "in step": linked.block(args.steps, changes=True, ahead=False),
        }
        for name, other in (("beside", beside), ("copied", copy)):
            arms[name] = other.during(lambda: plain.block(args.steps, changes=False, ahead=False))
        wall = {name: seconds for name, (seconds, _) in arms.items()}
        cpu = {name: seconds for name, (_, seconds) in arms.items()}
        if files:
            wall["disk"] = moved / read_rate([p for layer in files.paths for p in layer][:64], 4)
        took = wall["disk"] if files else link
        rows.append(
            wall
            | {
                "queue / compute": wall["queue"] / wall["compute"],
                "queue / compute, processor": cpu["queue"] / cpu["compute"],
                "beside / compute": wall["beside"] / wall["compute"],
                "copied / compute": wall["copied"] / wall["compute"],
                "ahead / max(copied, link)": wall["ahead"] / max(wall["copied"], took),
                "ahead / (compute + link)": wall["ahead"] / (wall["compute"] + took),
                "in step / max(copied, link)": wall["in step"] / max(wall["copied"], took),
                "in step / (compute + link)": wall["in step"] / (wall["compute"] + took),
            }
        )
    found = {
        name: np.percentile([row[name] for row in rows], (50, 25, 75)).tolist() for name in rows[0]
    }
    link = found["disk"][0] if files else link
    return {"rate": moved / link, "link": link, "moved": moved, **found}


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add_sizes(parser)
    add = parser.add_argument
    add("--file", type=Path, help="experts stay in a checkpoint in this folder")
    add("--no-verify-reads", action="store_true", help="as of moejax, with --file")
    add("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(arguments)
    check_sizes(args)
    found = measure(args)
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
