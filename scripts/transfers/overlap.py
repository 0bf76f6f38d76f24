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
import dataclasses
import json
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from host_offload.memory.tables import Entry
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from moejax.checkpoints.random_model import random_model
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.start.build import start_engine
from moejax.start.options import Options
from moejax.step.parts import Routing
from moejax.step.programs import STAGES
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.parts.commands import new_parser, refuse
from scripts.parts.decode_timing import Sequences, prefill

CONTEXT, STEPS = 16, 48
"""Tokens before the first step; most steps of a block."""


PIECES = 200
"""Pieces of a copy for which nobody waits, more than any block takes."""


@dataclasses.dataclass
class Bench:
    """An engine and one sequence in it. changing: experts of each layer that change with a step."""

    engine: Engine
    sequences: Sequences
    changing: int

    @property
    def layers(self) -> int:
        return self.engine.runner.tables.clock.shape[0]

    def routing(self, group: int) -> Routing:
        runner = self.engine.runner
        k, experts = runner.config.num_experts_per_tok, runner.config.num_experts
        stay = k - self.changing
        first = stay + group % ((experts - stay) // self.changing) * self.changing
        ids = [*range(stay), *range(first, first + self.changing)]
        shape = (self.layers, runner.shapes.bucket(1), k)
        given = np.broadcast_to(np.array(ids, np.int32), shape).copy()
        return Routing(given, np.full(shape, 1 / k, np.float32))

    def ahead(self, group: int) -> list[Entry]:
        """The transfers of a group into the cells that the group before the last had."""
        bank = self.engine.runner.config.num_experts_per_tok - self.changing
        bank += group % 2 * self.changing
        experts = self.routing(group).ids[0, 0, -self.changing :].tolist()
        return [
            Entry(layer, expert, 0, bank + i)
            for layer in range(self.layers)
            for i, expert in enumerate(experts)
        ]

    def begin(self) -> None:
        """Nothing is resident, and nothing flies."""
        runner = self.engine.runner
        for name in ("owner", "address"):
            shape = getattr(runner.tables, name).shape
            runner.set_tables({name: np.full(shape, -1, np.int32)})

    def block(self, steps: int, *, changes: bool, ahead: bool) -> tuple[float, float]:
        """Seconds of a step by the clock and of the processor, after two others."""
        self.begin()
        runner, previous, began = self.engine.runner, None, (0.0, 0.0)
        update = np.zeros(runner.shapes.rows, bool)
        row = self.sequences.rows[0]
        update[row] = True
        for step in range(steps + 2):
            positions = np.full(runner.shapes.rows, -1, np.int32)
            positions[row] = self.sequences.context + step
            given = self.ahead(step + 1) if ahead else []
            routing = self.routing(step if changes else 0)
            stages = runner.stage_list(given)
            output = runner.decode(positions, self.sequences.block_table, routing, stages)
            runner.sample(output.logits, update, None)
            if previous is not None:
                missed = previous.read().missed.sum()
                if step > 2 and missed != (changes and not ahead) * self.changing * self.layers:
                    raise RuntimeError(f"{missed} experts were missing in step {step - 1}")
            if step == 1:
                jax.block_until_ready(output.logits)
                began = time.perf_counter(), time.process_time()
            previous = output
        jax.block_until_ready(previous.logits if previous else 0)
        ended = time.perf_counter(), time.process_time()
        return (ended[0] - began[0]) / steps, (ended[1] - began[1]) / steps


def make(
    loaded,
    args: argparse.Namespace,
    changing: int,
    rate: float | None = None,
    *,
    driver: str = "device",
    transfers: str | None = None,
    ops: str = "auto",
) -> Bench:
    config = loaded.config
    record = 3 * config.hidden_size * config.moe_intermediate_size * 2
    cells = config.num_experts_per_tok + changing
    options = Options(
        "OLMoE",
        max_num_seqs=1,
        max_model_len=CONTEXT + STEPS + 16,
        max_num_batched_tokens=64,
        expert_budget=cells * args.layers * record,
        kv_budget=64 << 20,
        eviction="lru",
        link_rate=rate,
        driver=driver,
        transfers=transfers,
        ops=ops,
    )
    engine, _ = start_engine(loaded, options, select_device())
    engine.runner.prepare_stages()
    engine.runner.wait_compiled(everything=True)
    _, sequences = prefill(engine, [[7] * CONTEXT], STEPS + 8)
    return Bench(engine, sequences, changing)


class Copy:
    """A copy at a rate for which nobody waits."""

    def __init__(self, rate: float, nbytes: int):
        self.queue = NativeQueue(rate=rate)
        self.queue.forget_settled()
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
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="(default: %(default)s)")
    add("--steps", type=int, default=24, help=f"of a block, to {STEPS} (default: %(default)s)")
    add("--layers", type=int, default=2, help="2, 4 or 8 (default: %(default)s)")
    add("--experts", type=int, default=32, help="of a layer (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(arguments)
    try:
        if args.layers not in (2, 4, 8) or not 2 <= args.steps <= STEPS or args.experts < 24:
            raise UserError(f"--layers is 2, 4 or 8, --steps 2 to {STEPS}, --experts 24 or more")
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
