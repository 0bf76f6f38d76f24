"""Whether jax's own copies run beside a device's programs, alone and under the host driver.

python -m scripts.transfers device [--rounds 9] [--layers 2] [--experts 32] [--json]

First without an engine: records of OLMoE-1B-7B's size, each in pinned arrays of its own, and a
chain of products that takes about as long as their copies. In each round:

  one, copies   one record, all records: what the link gives
  compute       the products alone
  before        copies begin, then the products are dispatched: as long as the longer of both, if
                they run beside each other
  after         the other way round: as long as both, where a copy waits for what is enqueued
  land          the move of each record that came into its place in an arena

Then decode steps of the host driver, batch 1, routing forced as in `overlap`: with ops that copy
in their place, and with the queue.

  ops still, queue still   nothing changes: what the queue costs
  ops in step              what changes is copied by ops
  in step, ahead           what changes is a demand, or came by an oracle's prefetch

Printed are medians of the rounds with their quartiles, in ms, and of their ratios. On a CPU the
command shows that it runs: a copy there is work of the same processors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.arena import allocate_arena
from host_offload.queue.device import DeviceQueue
from host_offload.queue.pinned import PinnedBuilder, PinnedRecords
from host_offload.queue.transfer import DEMAND, Transfer
from moejax.checkpoints.random_model import random_model
from moejax.device import select_device
from moejax.models.config import parse_config
from moejax.step.programs import STAGES
from pallas_kernels.records.format import RecordFormat
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.parts.commands import new_parser, refusing
from scripts.transfers.changing_steps import Bench, add_sizes, check_sizes, make

RECORDS = 10
"""In flight at once: nine tenths of a link's rate (shared/DESIGN.md, section 6)."""

SIZE = 2048
"""Rows and columns of the products."""


class Raw:
    """Copies, products and moves without an engine."""

    def __init__(self, device: jax.Device, record: RecordFormat):
        self.record, self.device = record, device
        builder = PinnedBuilder(record, 1, RECORDS, device)
        builder.put(0, 0, np.ones((RECORDS, record.rows, record.hidden), np.uint16))
        self.records: PinnedRecords = builder.finish().arrays["dense"]
        self.arena = allocate_arena(RECORDS * record.rows, record.hidden, device)
        self.matrix = jax.device_put(np.eye(SIZE, dtype=jnp.bfloat16), device)
        self.products, self.land = jax.jit(_products), jax.jit(_land, donate_argnums=0)
        self.trips = 1
        self.queue = DeviceQueue(self.records, device)
        for _ in range(2):  # compiled, and warm
            self.timed(self.copies, self.compute, self.move)
        alone = self.timed(self.compute)
        while self.trips < 1 << 20 and alone < self.timed(self.copies) / 2:
            self.trips, alone = 2 * self.trips, self.timed(self.compute)

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def copies(self, count: int = RECORDS) -> list[jax.Array]:
        """Begins copies, and gives what is ready when they are there."""
        tickets = [self.queue.submit(Transfer(0, e, 0, e, DEMAND)) for e in range(count)]
        self.queue.begin()
        found: list[jax.Array] = []

        def taken(pieces: Sequence[jax.Array]) -> jax.Array:
            found.extend(pieces)
            return pieces[-1]

        for ticket in tickets:
            self.queue.take(ticket, taken)
        return found

    def compute(self) -> list[jax.Array]:
        return [self.products(self.matrix, self.trips)]

    def move(self) -> list[jax.Array]:
        """As copies, into the arena."""
        pieces = self.copies()
        each = len(pieces) // RECORDS
        for number in range(RECORDS):
            record = pieces[number * each : (number + 1) * each]
            self.arena = self.land(self.arena, np.int32(number * self.record.rows), record)
        return [self.arena]

    def timed(self, *parts: Callable[[], list[jax.Array]]) -> float:
        """Seconds from the first dispatch until everything is there."""
        began = time.perf_counter()
        jax.block_until_ready([part() for part in parts])
        seconds = time.perf_counter() - began
        self.queue.observe()
        return seconds

    def round(self) -> dict[str, float]:
        found = {
            "one": self.timed(lambda: self.copies(1)),
            "copies": self.timed(self.copies),
            "compute": self.timed(self.compute),
            "before": self.timed(self.copies, self.compute),
            "after": self.timed(self.compute, self.copies),
        }
        moved = self.timed(self.move)
        longer = max(found["copies"], found["compute"])
        return found | {
            "land": max(moved - found["copies"], 0.0) / RECORDS,
            "before / longer": found["before"] / longer,
            "after / sum": found["after"] / (found["copies"] + found["compute"]),
            "GB/s, one": self.nbytes / found["one"] / 1e9,
            "GB/s, all": RECORDS * self.nbytes / found["copies"] / 1e9,
        }


def _products(matrix: jax.Array, trips: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, trips, lambda _, x: (x @ matrix).astype(x.dtype), matrix)


def _land(arena: jax.Array, row: jax.Array, pieces: Sequence[jax.Array]) -> jax.Array:
    for piece in pieces:
        arena = jax.lax.dynamic_update_slice(arena, piece, (row, 0))
        row = row + piece.shape[0]
    return arena


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Arm → (median, first and third quartile) of the rounds: ms; ratios where it has a slash."""
    device, changing = select_device(), STAGES // args.layers
    ops = args.ops or ("move=xla" if device.platform == "cpu" else "auto")
    fields = OLMOE | {"num_hidden_layers": args.layers, "num_experts": args.experts}
    config = parse_config(fields | {"vocab_size": 1024, "eos_token_id": 1})
    raw = Raw(
        device, RecordFormat("dense", config.hidden_size, config.moe_intermediate_size, "bfloat16")
    )
    loaded = random_model(config, device=device)
    separate = random_model(config, device=device, new_builder=PinnedBuilder)
    plain = make(loaded, args, changing, driver="host", ops=ops)
    queued = make(separate, args, changing, driver="host", transfers="queue", ops=ops)
    rows = []
    for _ in range(args.rounds):
        arms = raw.round()
        arms |= _steps(plain, "ops", args.steps) | _steps(queued, "queue", args.steps)
        rows.append(arms)
    for row in rows:
        row["queue still / ops still"] = row["queue still"] / row["ops still"]
        row["queue ahead / queue still"] = row["queue ahead"] / row["queue still"]
        row["queue ahead / queue in step"] = row["queue ahead"] / row["queue in step"]
        row["queue in step / ops in step"] = row["queue in step"] / row["ops in step"]
    quartiles = 50, 25, 75
    return {
        name: (np.percentile([row[name] for row in rows], quartiles) * _scale(name)).tolist()
        for name in rows[0]
    }


def _scale(name: str) -> float:
    return 1.0 if "/" in name else 1e3


def _steps(bench: Bench, name: str, steps: int) -> dict[str, float]:
    arms = {"still": (False, False), "in step": (True, False), "ahead": (True, True)}
    return {
        f"{name} {arm}": bench.block(steps, changes=changes, ahead=ahead)[0]
        for arm, (changes, ahead) in arms.items()
    }


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add_sizes(parser)
    parser.add_argument(
        "--ops", help="(default: auto on a GPU, move=xla on a CPU, so that the arena is an array)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an arm")
    args = parser.parse_args(arguments)
    check_sizes(args)
    found = measure(args)
    for name, (middle, low, high) in found.items():
        if args.json:
            print(json.dumps({"arm": name, "median": middle, "q1": low, "q3": high}))
        else:
            unit = "" if "/" in name else " ms"
            print(f"{name:<28} {middle:9.3f}{unit}  ({low:.3f} … {high:.3f})")
    return 0
