"""Decode steps in the sizes of known models: time per step beside its floor.

python scripts/bench_decode.py --help says what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

import moejax
from host_offload.budget import BudgetError, Share, format_bytes
from host_offload.device_memory import host_available_bytes
from host_offload.eviction import victim_weights
from moejax import LLM
from moejax.decode_report import measured_line, table
from moejax.decode_timing import (
    ROUTINGS,
    Samples,
    decode,
    forced_routings,
    generate,
    grant,
    no_compilation,
    prefill,
)
from moejax.engine import Engine
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.random_model import SHAPES, model_bytes, random_model, shape
from moejax.rates import measure_rates
from moejax.startup import Limits, start_engine, use_compilation_cache
from pallas_kernels.dispatch import parse_ops

HOST_RESERVE = 1 << 30
"""Host memory left to everything that is not weights or arena."""

DESCRIPTION = """\
Decode steps through the engine's own executables, in the sizes of known models: random weights
(demo without --layers: the embedded model), one engine, one compilation. Rows of the table are
batch size × cells per layer (experts that a layer keeps in the arena); cells change between rows by
table contents only, and the bench fails if anything is compiled while it measures."""

EPILOG = """\
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

through:
  runner     the steps alone; llm: LLM.generate end to end (embedded demo model, real routing)

routing:
  real       the model's own router (random weights route almost uniformly)
  uniform    every token draws its experts anew, all equally likely
  zipf       likewise, the r-th most popular expert of a layer with probability ~ 1/r

The XLA ops compute in tiles of 16 rows, so a batch of 1 costs some of them as much as 16.

examples:
  python scripts/bench_decode.py --cells 0,4,8,16
  python scripts/bench_decode.py --shape qwen3-30b-a3b --layers 2 --batch 1,8 --cells 0,25%,100%
  python scripts/bench_decode.py --shape olmoe --routing zipf --json > olmoe.jsonl
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table. through: "runner" or "llm"."""

    through: str
    batch: int
    cells: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit status, 2 for a mistake that the message explains."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except (UserError, BudgetError, MemoryError) as error:
        print(f"bench_decode: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_decode",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", default="demo", help=f"{', '.join(SHAPES)} (default: %(default)s)")
    add("--layers", type=int, help="layers, when the whole model does not fit (default: all)")
    add("--batch", default="1,8", help="sequences decoded at once (default: %(default)s)")
    add(
        "--cells",
        default="0,25%,50%,100%",
        help="cells per layer: numbers or shares of a layer's experts (default: %(default)s)",
    )
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
    add("--dtype", default="auto", help="auto (bfloat16), bfloat16, float16 or float32")
    add("--eviction", default="lru", help="lru or lfu (default: %(default)s)")
    add("--ops", default="auto", help="implementation of the ops (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and routing (default: 0)")
    add("--json", action="store_true", help="one JSON object per row on stdout, no table")
    return parser


def _run(args: argparse.Namespace) -> None:
    config = shape(args.shape, args.layers)
    batches = _numbers(args.batch, "--batch", least=1)
    cells = _cells(args.cells, config.num_experts)
    for name in ("context", "steps", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.warmup < 0:
        raise UserError(f"--warmup must not be negative, got {args.warmup}")
    if args.routing not in ROUTINGS:
        raise UserError(f"routing {args.routing!r} is unknown; choose {', '.join(ROUTINGS)}")
    try:
        victim_weights(args.eviction)
        parse_ops(args.ops)
    except ValueError as error:
        raise UserError(str(error)) from error
    repeats = min(args.repeats, args.steps)
    counts = [args.steps // repeats + (i < args.steps % repeats) for i in range(repeats)]
    longest = args.context + 1 + max(args.warmup, 1) + max(counts)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"--context {args.context} and the steps after it need {longest} positions, the model "
            f"has {config.max_position_embeddings}; lower --context"
        )
    check_memory(config, args.shape, args.dtype, max(cells), host_available_bytes())
    with _engine(args, config, max(batches), longest, max(cells)) as (engine, llm):
        through = ("runner", "llm") if llm and args.routing == "real" else ("runner",)
        cases = [Case(t, b, c) for t in through for b in batches for c in cells]
        rates = measure_rates(engine.runner)
        samples = {case: Samples() for case in cases}
        for _, group in itertools.groupby(cases, lambda case: (case.through, case.batch)):
            _measure(args, engine, llm, list(group), counts, samples)
        lines = [
            {"shape": args.shape, "routing": args.routing, "through": case.through}
            | measured_line(
                engine.runner,
                rates,
                samples[case],
                batch=case.batch,
                cells=case.cells,
                context=args.context,
            )
            for case in cases
        ]
    for line in [json.dumps(line) for line in lines] if args.json else table(lines):
        print(line)


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes whole numbers with commas, not {text!r}") from None
    if min(numbers) < least:
        raise UserError(f"{option} must be at least {least}, got {min(numbers)}")
    return numbers


def _cells(text: str, experts: int) -> list[int]:
    cells = []
    for part in text.split(","):
        percent = part.strip().endswith("%")
        (number,) = _numbers(part.strip().removesuffix("%"), "--cells", least=0)
        cells.append(round(number / 100 * experts) if percent else number)
        if cells[-1] > experts:
            raise UserError(f"--cells {part} is more than a layer's {experts} experts")
    return list(dict.fromkeys(cells))


def check_memory(config: ModelConfig, name: str, dtype: str, cells: int, available: int) -> None:
    """Raises UserError if weights and arena exceed `available` bytes of host memory, saying how
    many layers fit. cells: per layer, of the largest arena."""

    def need(layers: int) -> tuple[int, int, int]:
        experts, rest = model_bytes(shape(name, layers), dtype)
        # On a CPU the arena is host memory too.
        arena = experts * cells // config.num_experts if jax.default_backend() == "cpu" else 0
        return experts, rest, arena

    experts, rest, arena = need(config.num_hidden_layers)
    room = available - HOST_RESERVE
    if experts + rest + arena <= room:
        return
    one, two = sum(need(1)), sum(need(2))
    fitting = (room - one) // (two - one) + 1
    advice = f"use --layers {fitting}" if fitting > 0 else "not even one layer fits"
    raise UserError(
        f"{name} with {config.num_hidden_layers} layers needs {format_bytes(experts)} of host "
        f"memory for experts, {format_bytes(rest)} for other weights and {format_bytes(arena)} for "
        f"an arena of {cells} cells a layer; {format_bytes(available)} are available and "
        f"{format_bytes(HOST_RESERVE)} are kept free: {advice}"
    )


@contextmanager
def _engine(
    args: argparse.Namespace, config: ModelConfig, rows: int, longest: int, cells: int
) -> Iterator[tuple[Engine, LLM | None]]:
    """The engine with an arena of `cells` a layer; for the embedded model also its LLM."""
    share = Share(cells / config.num_experts)
    limits = dict(max_num_seqs=rows, max_model_len=longest, max_num_batched_tokens=2048)
    if args.shape == "demo" and args.layers is None:
        demo = Path(moejax.__file__).parent / "demo"
        options = dict(dtype=args.dtype, seed=args.seed, eviction=args.eviction, ops=args.ops)
        with LLM(demo, expert_budget=share, progress=False, **limits, **options) as llm:
            yield llm.engine, llm
        return
    device = jax.devices()[0]
    use_compilation_cache(None)
    loaded = random_model(config, args.dtype, device, args.seed)
    try:
        engine, _ = start_engine(
            loaded,
            Limits(expert_budget=share, **limits),
            eviction=args.eviction,
            ops=parse_ops(args.ops),
            device=device,
            seed=args.seed,
            listener=None,
        )
    except BaseException:
        loaded.store.delete()
        raise
    try:
        engine.runner.wait_compiled()
        yield engine, None
    finally:
        engine.runner.delete()


# ---- measuring


def _measure(
    args: argparse.Namespace,
    engine: Engine,
    llm: LLM | None,
    cases: list[Case],
    counts: list[int],
    samples: dict[Case, Samples],
) -> None:
    """All cells of one batch size, in interleaved rounds of counts[i] steps each."""
    runner, random = engine.runner, np.random.default_rng(args.seed)
    warmup = max(args.warmup, 1)
    vocabulary = runner.config.vocab_size
    prompts = random.integers(vocabulary, size=(cases[0].batch, args.context)).tolist()
    if cases[0].through == "llm":
        assert llm is not None
        requests = []

        def run(first: int, steps: int, samples: Samples) -> None:
            generate(llm, prompts, steps, samples)

    else:
        # The same routing for every number of cells: their misses are comparable. Another one for
        # each round and its warm-up, which would otherwise load what the timed steps need.
        total = warmup * (len(counts) + 1) + sum(counts)
        routings = forced_routings(args.routing, runner, cases[0].batch, total, random)
        requests, sequences = prefill(engine, prompts, warmup + max(counts))

        def run(first: int, steps: int, samples: Samples) -> None:
            decode(runner, sequences, routings[first : first + steps], samples)

    grant(engine, cases[0].cells)
    run(0, warmup, Samples())  # compiles what has not been
    first = warmup
    with no_compilation(runner):
        for count in counts:
            for case in cases:
                grant(engine, case.cells)
                run(first, warmup, Samples())
                run(first + warmup, count, samples[case])
            first += warmup + count
    engine.abort(requests)


if __name__ == "__main__":
    sys.exit(main())
