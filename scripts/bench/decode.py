"""Decode steps in the sizes of known models: time per step beside its floor.

python -m scripts.bench decode --help says what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoints.random_model import shape
from moejax.costs.rates import Rates, measure_rates
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.requests.request import Request
from moejax.step.executor import Executor
from moejax.step.walk import LOOK_EVERY
from scripts.bench import kernel_profile
from scripts.bench.kernel_profile import Profile
from scripts.parts.bench_engine import (
    add_options,
    check_names,
    decode_engine,
    described,
    grant,
    log_to,
    no_compilation,
    parse_cells,
    parse_numbers,
)
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.decode_timing import (
    ROUTINGS,
    Samples,
    Sequences,
    decode,
    forced_routings,
    prefill,
    step_bytes,
)
from scripts.parts.text_table import running

DESCRIPTION = """\
Decode steps through the engine's own executables, in the sizes of known models: random weights
(demo without --layers: the embedded model), one engine, one compilation. Rows of the table are
batch size × cells per layer (experts that a layer keeps in the arena); cells change between rows by
table contents only, and the bench fails if anything is compiled while it measures."""

EPILOG = """\
A row is printed when it is measured.

columns, each figure beside its floor (the least or most that the measured rates allow):
  ms/step    median, and p99, of the time between the results of two steps, all steps of all repeats
  floor      max(memory, link): the bytes a step must read from memory (dense weights, KV, active
             experts) over the memory's read rate, and the missed experts' bytes over the link's;
             they may overlap, so it is the larger of the two, not the sum
  tok/s      batch / median, and batch / floor
  misses     expert loads per step over all layers = fills (into a cell) + read-through (no cell);
             least: active experts beyond the layer's cells, which no policy can avoid
  link GB/s  missed bytes / median, and the link's rate: the fill op alone on the same store
  host ms    median time a step spends in Python (schedule, dispatch); the device works meanwhile
             on the step before, unless dispatch itself computes, as on a CPU it may

--profile (GPU), for each row, after all of the batch's rows were measured, with CUDA graphs on as
in every run (XLA_FLAGS may say otherwise):
  kernels    device events by name: calls and µs a step, share of all events' time
  idle       the share of the traced time in which nothing runs on the device; apart from it that
             between two programs, so between steps and between a step and its sampler. The profiler
             slows Python down, so a step that waits for Python looks worse than it is: compare the
             traced time of a step with ms/step

routing:
  real       the model's own router (random weights route almost uniformly)
  uniform    every token draws its experts anew, all equally likely
  zipf       likewise, the r-th most popular expert of a layer with probability ~ 1/r
  qwen3-like a token goes on where the one before it was, as published of Qwen3-30B-A3B

The XLA ops compute in tiles of 16 rows, so a batch of 1 costs some of them as much as 16.

examples:
  python -m scripts.bench decode --cells 0,4,8,16
  python -m scripts.bench decode --shape qwen3-30b-a3b --layers 2 --batch 1,8 --cells 0,25%,100%
  python -m scripts.bench decode --shape olmoe --routing zipf --json > olmoe.jsonl
  python -m scripts.bench decode --shape qwen3-30b-a3b --context 1024 --cells all,16,0 --profile
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    batch: int
    cells: int


@refusing(MemoryError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    profiles: dict[Case, Profile] = {}
    lines = run(args, profiles)
    # Each row as it is measured: a run that is ended has shown what it has.
    for text in map(json.dumps, lines) if args.json else table(lines):
        print(text, flush=True)
    for case, profile in profiles.items() if not args.json else ():
        print(f"\nbatch {case.batch}, {case.cells} cells a layer")
        print(*kernel_profile.table(profile), sep="\n", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, DESCRIPTION, EPILOG)
    add_options(parser, cells="0,25%,50%,100%")
    add = parser.add_argument
    add("--batch", default="1,8", help="sequences decoded at once (default: %(default)s)")
    add("--routing", default="real", help=f"{', '.join(ROUTINGS)} (default: %(default)s)")
    add("--context", type=int, default=128, help="tokens before the first step (%(default)s)")
    add("--steps", type=int, default=50, help="timed steps of each row (default: %(default)s)")
    add("--warmup", type=int, default=10, help="untimed steps before each repeat (%(default)s)")
    add(
        "--repeats",
        type=int,
        default=5,
        help="rounds over all cells that the steps are split into, so that a slow moment of the "
        "machine meets all of them (default: %(default)s)",
    )
    add("--output", type=Path, metavar="FILE", help="also adds each row to the file, as JSON lines")
    add("--profile", action="store_true", help="also trace steps of each row: time per kernel")
    return parser


def run(args: argparse.Namespace, profiles: dict[Case, Profile]) -> Iterator[dict[str, Any]]:
    """A line for each case, as soon as it is measured. profiles: gets what was profiled."""
    config = shape(args.shape, args.layers)
    batches = parse_numbers(args.batch, "--batch", least=1)
    cells = parse_cells(args.cells, config.num_experts)
    positive(args, "context", "steps", "repeats")
    if args.warmup < 0:
        raise UserError(f"--warmup must not be negative, got {args.warmup}")
    if args.routing not in ROUTINGS:
        raise UserError(f"routing {args.routing!r} is unknown; choose {', '.join(ROUTINGS)}")
    check_names(args)
    repeats = min(args.repeats, args.steps)
    counts = [args.steps // repeats + (i < args.steps % repeats) for i in range(repeats)]
    longest = args.context + 1 + max(args.warmup, 1) + max(counts)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"--context {args.context} and the steps after it need {longest} positions, the model "
            f"has {config.max_position_embeddings}; lower --context"
        )
    if args.profile:
        kernel_profile.profile_graphs()
    device = select_device()
    if args.profile:
        kernel_profile.require_track(device)
    rows = max(batches)
    with decode_engine(args, config, device, cells, rows=rows, longest=longest) as engine:
        rates = measure_rates(engine.runner)
        for batch in batches:
            cases = [Case(batch, count) for count in cells]
            for case, samples in _measure(args, engine, cases, counts, profiles):
                line = {"shape": args.shape, "routing": args.routing} | measured_line(
                    engine.runner,
                    rates,
                    samples,
                    batch=case.batch,
                    cells=case.cells,
                    context=args.context,
                )
                if case in profiles:
                    line["profile"] = profiles[case].as_json()
                log_to(args.output, line)
                yield line


# ---- measuring


def _measure(
    args: argparse.Namespace,
    engine: Engine,
    cases: list[Case],
    counts: list[int],
    profiles: dict[Case, Profile],
) -> Iterator[tuple[Case, Samples]]:
    """All cells of one batch size, in interleaved rounds of counts[i] steps each. profiles: gets
    those of the cases."""
    runner, random = engine.runner, np.random.default_rng(args.seed)
    warmup = max(args.warmup, 1)
    vocabulary = runner.config.vocab_size
    prompts = random.integers(vocabulary, size=(cases[0].batch, args.context)).tolist()
    # The same routing for every number of cells: their misses are comparable. Another one for each
    # round and its warm-up, which would otherwise load what the timed steps need.
    total = warmup * (len(counts) + 2) + sum(counts) + max(counts)
    routings = forced_routings(args.routing, runner, cases[0].batch, total, random)
    requests: list[Request] = []

    def run(first: int, steps: int, samples: Samples) -> None:
        decode(runner, sequences, routings[first : first + steps], samples)

    def ready(case: Case, first: int) -> None:
        """Gives layers the case's cells, and everything time to settle."""
        nonlocal requests, sequences
        grant(engine, case.cells)
        whole = case.cells == runner.config.num_experts
        if whole or not requests:
            # A prompt's tokens ask for every expert, a few steps would not.
            engine.abort(requests)
            requests, sequences = prefill(engine, prompts, warmup + max(counts))
        # The host looks now and then whether every expert is in its cell, and plans no more then.
        for _ in range(1 + whole * (1 + LOOK_EVERY // warmup)):
            run(first, warmup, Samples())

    sequences: Sequences
    names = None
    while names != (names := runner.executables()):  # compiles what this batch calls
        ready(max(cases, key=lambda case: case.cells), 0)
        runner.wait_compiled(everything=True)
    first, samples = warmup, {case: Samples() for case in cases}
    with no_compilation(runner):
        for i, count in enumerate(counts):
            for case in cases:
                ready(case, first)
                run(first + warmup, count, samples[case])
                if i == len(counts) - 1 and not args.profile:
                    yield case, samples[case]
            first += warmup + count
        for case in cases if args.profile else ():
            ready(case, first)
            # decode waits for the last step, so the trace holds whole steps.
            steps = max(counts)
            traced = functools.partial(run, first + warmup, steps, Samples())
            profiles[case] = kernel_profile.record(traced, steps)
            yield case, samples[case]
    engine.abort(requests)


# ---- the report


def measured_line(
    runner: Executor, rates: Rates, samples: Samples, *, batch: int, cells: int, context: int
) -> dict[str, Any]:
    """What a case measured, each figure beside its floor; the fields of the bench's JSON lines.

    cells: per layer. context: tokens that each of `batch` sequences attends to, at least. The floor
    of a step is max(memory, link): dense weights, KV and active experts at the memory's read rate,
    missed experts at the link's. The least misses are the active experts beyond a layer's cells.
    """
    record = runner.layout.records[0].nbytes
    active, fills, read_through = (
        np.array(counts, float)  # [steps, L]
        for counts in (samples.active, samples.fills, samples.read_through)
    )
    misses = float(np.mean(np.sum(fills + read_through, axis=1)))
    read = step_bytes(runner, float(np.mean(np.sum(active, axis=1))), batch=batch, context=context)
    floor_memory = sum(read.values()) / rates.memory
    floor_link = misses * record / rates.link
    floor = max(floor_memory, floor_link)
    median = float(np.median(samples.step_s))
    return {
        **described(runner),
        "context": context,
        "rows": runner.shapes.bucket(batch),
        "batch": batch,
        "cells_per_layer": cells,
        "steps": len(samples.step_s),
        "ms_per_step": median * 1e3,
        "ms_per_step_p99": float(np.percentile(samples.step_s, 99)) * 1e3,
        "floor_ms": floor * 1e3,
        "floor_memory_ms": floor_memory * 1e3,
        "floor_link_ms": floor_link * 1e3,
        "tokens_per_s": batch / median,
        "ceiling_tokens_per_s": batch / floor,
        "active_per_step": float(np.mean(np.sum(active, axis=1))),
        "misses_per_step": misses,
        "fills_per_step": float(np.mean(np.sum(fills, axis=1))),
        "read_through_per_step": float(np.mean(np.sum(read_through, axis=1))),
        "least_misses_per_step": float(np.mean(np.sum(np.maximum(active - cells, 0.0), axis=1))),
        "link_gb_per_s": misses * record / median / 1e9,
        "link_rate_gb_per_s": rates.link / 1e9,
        "memory_rate_gb_per_s": rates.memory / 1e9,
        "host_ms": float(np.median(samples.host_s)) * 1e3 if samples.host_s else 0.0,
    }


COLUMNS = (
    ("batch", "{batch}"),
    ("cells", "{cells_per_layer}"),
    ("ms/step", "{ms_per_step:.2f}"),
    ("p99", "{ms_per_step_p99:.2f}"),
    ("floor", "{floor_ms:.2f}"),
    ("memory", "{floor_memory_ms:.2f}"),
    ("link", "{floor_link_ms:.2f}"),
    ("tok/s", "{tokens_per_s:.1f}"),
    ("ceiling", "{ceiling_tokens_per_s:.1f}"),
    ("misses", "{misses_per_step:.1f}"),
    ("fills", "{fills_per_step:.1f}"),
    ("read-thr", "{read_through_per_step:.1f}"),
    ("least", "{least_misses_per_step:.1f}"),
    ("link GB/s", "{link_gb_per_s:.2f}"),
    ("rate", "{link_rate_gb_per_s:.2f}"),
    ("host ms", "{host_ms:.2f}"),
)
"""Heading → how a line is shown under it."""


def table(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Lines of text for people, each as soon as its row is there. lines: of one run,
    measured_line's fields with shape and routing."""
    lines = iter(lines)
    first = next(lines)
    yield (
        "{shape}, {layers} layers of {experts} experts, {dtype}, on {device}, jax {jax}; "
        "{routing} routing, context {context}, {steps} steps".format(**first)
    )
    yield (
        "measured: link {link_rate_gb_per_s:.2f} GB/s, memory {memory_rate_gb_per_s:.2f} GB/s; "
        "floor = max(memory, link)".format(**first)
    )
    yield from running(COLUMNS, itertools.chain([first], lines))
