"""Decode steps of one sequence of which some experts change with every step, routing forced."""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import numpy as np

from host_offload.memory.tables import Entry
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.start.build import start_engine
from moejax.start.options import Options
from moejax.step.parts import Routing
from scripts.parts.decode_timing import Sequences, prefill

CONTEXT, STEPS = 16, 48
"""Tokens before the first step; most steps of a block."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options of a bench of such steps, which `check_sizes` looks at."""
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="(default: %(default)s)")
    add("--steps", type=int, default=24, help=f"of a block, to {STEPS} (default: %(default)s)")
    add("--layers", type=int, default=2, help="2, 4 or 8 (default: %(default)s)")
    add("--experts", type=int, default=32, help="of a layer (default: %(default)s)")


def check_sizes(args: argparse.Namespace) -> None:
    """Raises UserError for what `make` and the blocks cannot have."""
    if args.layers not in (2, 4, 8) or not 2 <= args.steps <= STEPS or args.experts < 24:
        raise UserError(f"--layers is 2, 4 or 8, --steps 2 to {STEPS}, --experts 24 or more")


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
    loaded: LoadedModel,
    args: argparse.Namespace,
    changing: int,
    rate: float | None = None,
    *,
    driver: str = "device",
    transfers: str | None = None,
    ops: str = "auto",
) -> Bench:
    """A bench of these weights, of which so many experts of a layer change. rate: of a link, None:
    of none. driver, transfers, ops: as of Options. Experts in files stay there."""
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
        store="file" if loaded.store.files else "memory",
        verify_reads=all(files.verify for files in loaded.store.files.values()),
    )
    engine, _ = start_engine(loaded, options, select_device())
    engine.runner.prepare_stages()
    engine.runner.wait_compiled(everything=True)
    _, sequences = prefill(engine, [[7] * CONTEXT], STEPS + 8)
    return Bench(engine, sequences, changing)
