"""A CPU that computes missed experts beside a GPU: what it takes; does its placement repeat.

python -m scripts.policies beside [--shape qwen3-30b-a3b] [--layers 4] [--batch 1,16] [--tokens 24]
    [--expert-budget 25%] [--accelerator 20us] [--attention 100us] [--json]

Random weights, experts in pinned arrays that jax copies (transfers="queue"). First the costs that
placements go by here: t_c(m), the second processor's op on an expert in the pinned store for 1 to
64 rows, the fit β·m + C of it, and t_io, a record of eight on their way; t_g and t_attn are stated.
Then tokens a second of each arm in one engine, residents and prompts equal: load-all loads what is
missed, fiddler computes it on the CPU, prescope divides it, by gates. Columns: experts that the CPU
computed, of those missed; seconds of both at work over those of the shorter one; mean difference of
when both were done in a layer.

Last a recorded run of prescope and two that repeat its placement: tokens and log-probabilities must
be equal, bit by bit, or the command fails. On a CPU the command shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.policies.eviction.names import eviction_policy
from host_offload.policies.placement.names import with_placement
from host_offload.queue.pinned import PinnedRecords
from moejax import SamplingParams
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import random_model, shape
from moejax.costs.in_place import ROWS
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.engine.statistics import placement_stats
from moejax.start.build import start_engine
from moejax.start.decide.transfers import new_builder
from moejax.start.options import Options
from moejax.start.settings import settings_of
from moejax.step.drivers.placed_queued import PlacedQueuedRunner
from moejax.step.programs import ProgramKey
from scripts.parts.commands import new_parser, refusing
from scripts.parts.text_table import aligned

ARMS = {"load-all": "fate", "fiddler": "fiddler", "prescope": "prescope"}
"""Arm → its placement."""

IN_FLIGHT, REPEATS, CONTEXT = 8, 9, 16

COLUMNS = [
    ("arm", "{arm}"),
    ("batch", "{batch}"),
    ("tokens/s", "{tokens_per_s:.1f}"),
    ("beside", "{beside:.0%}"),
    ("together", "{together:.0%}"),
    ("gap ms", "{gap_ms:.3f}"),
]


@refusing(OSError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    jobs = [int(text) for text in args.batch.split(",")]
    found = [line for batch in jobs for line in _batch(args, batch)]
    again = _repeated(args, jobs[-1])
    if args.json:
        print(*map(json.dumps, [*found, again]), sep="\n")
    else:
        print(*aligned(COLUMNS, [line for line in found if "tokens_per_s" in line]), sep="\n")
        print(*(json.dumps(line) for line in [*found, again] if "tokens_per_s" not in line))
    return 0 if again["same"] else 1


def _batch(args: argparse.Namespace, batch: int) -> Iterator[dict[str, Any]]:
    """The costs, and a line for each arm."""
    first = f"prescope,per_token=1us,startup=1us,load=1us,{_stated(args)},predict=gates"
    engine = _engine(args, batch, first)
    try:
        runner = engine.runner
        assert isinstance(runner, PlacedQueuedRunner) and engine.control is not None
        costs = _costs(runner, batch)
        yield {"arm": "costs", "batch": batch, **costs}
        spec = engine.control.controller.spec
        cells = np.sum(np.asarray(runner.tables.cell_row) >= 0, axis=1).tolist()
        measured = ",".join(f"{n}={costs[n]!r}" for n in ("per_token", "startup", "load"))
        for arm, placement in ARMS.items():
            ahead = ",predict=gates" if arm == "prescope" else ""
            said = f"{placement},{measured},{_stated(args)}{ahead}"
            policies = [eviction_policy("lru"), *with_placement(said, ())]
            engine.begin_anew(spec, policies, cells)
            _run(engine, args, batch, tokens=4)  # fills cells
            yield {"arm": arm, "batch": batch, **_counted(engine, args, batch)}
    finally:
        _close(engine)


def _counted(engine: Engine, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    runner = engine.runner
    assert isinstance(runner, PlacedQueuedRunner)
    before = placement_stats(runner.placement_totals, None, runner.steps.second) or {}
    paging = dict(engine.statistics.paging)
    began = time.perf_counter()
    _run(engine, args, batch, tokens=args.tokens)
    took = time.perf_counter() - began
    after = placement_stats(runner.placement_totals, None, runner.steps.second) or {}
    names = ("layers", "experts", "accelerator_s", "second_s", "both_s", "gap_s")
    more = {name: after[name] - before[name] for name in names}
    missed = sum(engine.statistics.paging[n] - paging[n] for n in ("fills", "read_through"))
    shorter = min(more["accelerator_s"], more["second_s"])
    return {
        "tokens_per_s": batch * args.tokens / took,
        "beside": more["experts"] / max(missed + more["experts"], 1),
        "together": more["both_s"] / shorter if shorter else 0.0,
        "gap_ms": 1e3 * more["gap_s"] / max(more["layers"], 1),
    }


def _costs(runner: PlacedQueuedRunner, batch: int) -> dict[str, Any]:
    """Seconds: C, β, t_io; and t_c by rows."""
    step, hidden = ProgramKey("decode", runner._bucket(batch)), runner.layout.hidden
    assert isinstance(runner.records, PinnedRecords)
    layers, experts = runner.records.shape[:2]
    every = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    dtype, seconds = runner.steps.dtype, {}
    for rows in ROWS:
        x = jax.device_put(np.ones((rows, hidden), dtype), runner._host)
        run = runner._compiled_ffn(step, rows).result()
        times = []
        for layer, expert in every[: REPEATS + 1]:  # each from memory
            record = runner._record(layer, expert)
            began = time.perf_counter()
            np.asarray(run(x, record, jax.device_put(np.int32(rows), runner._host)))
            times.append(time.perf_counter() - began)
        seconds[rows] = statistics.median(times[1:])
    slope, start = np.maximum(np.polyfit([*seconds], [*seconds.values()], 1), 1e-9)
    loads = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        records = [runner.records.of(*each) for each in every[:IN_FLIGHT]]
        jax.block_until_ready([runner.device_queue.put(pieces) for pieces in records])
        loads.append((time.perf_counter() - began) / len(records))
    return {
        "per_token": float(slope),
        "startup": float(start),
        "load": statistics.median(loads),
        "us_by_rows": {str(rows): round(1e6 * took, 1) for rows, took in seconds.items()},
    }


def _repeated(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Whether two runs repeat a recorded one."""
    with tempfile.TemporaryDirectory() as folder:
        trace, runs = Path(folder) / "trace", []
        costs = f"per_token=20us,startup=400us,load=200us,{_stated(args)}"
        for placement in (f"prescope,{costs},predict=gates", *[f"recorded={trace}"] * 2):
            engine = _engine(args, batch, placement, None if runs else trace)
            try:
                said = _run(engine, args, batch, tokens=args.tokens)
                assert isinstance(engine.runner, PlacedQueuedRunner)
                runs.append((said, engine.runner.placement_totals.experts))
                second = engine.runner.steps.second
            finally:
                _close(engine)
    return {
        "arm": "repeated",
        "batch": batch,
        "same": runs[0] == runs[1] == runs[2],
        "experts_beside": runs[0][1],
        "same_bits": second is not None and second.same_bits,
    }


def _close(engine: Engine) -> None:
    if engine.tracer is not None:
        engine.tracer.close()
    engine.runner.delete()


def _stated(args: argparse.Namespace) -> str:
    return f"accelerator={args.accelerator},attention={args.attention}"


def _engine(
    args: argparse.Namespace, batch: int, placement: str, trace: Path | None = None
) -> Engine:
    options = Options(
        args.shape,
        driver="host",
        transfers="queue",
        placement=placement,
        expert_budget=args.expert_budget,
        max_num_seqs=batch,
        max_model_len=-(-(CONTEXT + args.tokens + 1) // 64) * 64,
        max_num_batched_tokens=max(64, CONTEXT * batch),
        enable_prefix_caching=False,
        ops=args.ops,
        trace=trace,
    )
    engine, _ = start_engine(_model(args, options), options, select_device())
    engine.runner.wait_compiled(everything=True)
    return engine


def _model(args: argparse.Namespace, options: Options) -> LoadedModel:
    device = select_device()
    builder = new_builder(settings_of(options), device.platform)
    return random_model(shape(args.shape, args.layers), device=device, new_builder=builder)


def _run(engine: Engine, args: argparse.Namespace, batch: int, *, tokens: int) -> list[Any]:
    """Tokens and log-probabilities of each request."""
    rng = np.random.default_rng(args.seed)
    vocabulary = engine.runner.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    asked = [
        engine.add(rng.integers(1, vocabulary, CONTEXT).tolist(), params) for _ in range(batch)
    ]
    while not engine.idle:
        engine.step()
    return [(list(request.output), repr(request.logprobs)) for request in asked]


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", default="qwen3-30b-a3b", metavar="NAME")
    add("--layers", type=int, default=4)
    add("--batch", default="1,16", metavar="N,…")
    add("--tokens", type=int, default=24)
    add("--expert-budget", default="25%", metavar="SIZE|SHARE")
    add("--accelerator", default="20us", metavar="TIME")
    add("--attention", default="100us", metavar="TIME")
    add("--ops", default="auto")
    add("--seed", type=int, default=0)
    add("--json", action="store_true")
    return parser
