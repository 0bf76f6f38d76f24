"""What a trace costs: the share of the run time that it adds.

python -m scripts.bench trace [--batch 8] [--pairs 200] [--policy examples/recent_prefetch.py:CLASS]

A run decodes `batch` sequences; blocks of steps with and without the tracer alternate (ABBA), so
that both see the same machine and the same context lengths, and every traced block copies its
records once. The overhead is the median over pairs of blocks with its 95% interval (bootstrap); the
main thread's own seconds, which other processes change less, are compared as well. With a policy
both kinds of blocks run it; its decisions and transfers are a part of the trace. What a record
costs by itself, at a large model's size, is a part of `python -m scripts.bench host_loop`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.traces.reader import read_trace
from moejax import LLM, SamplingParams, UserError
from moejax.engine.loop import Engine
from moejax.evaluate.experiments.arms import arm_of
from moejax.traces.tracer import BATCH, Tracer
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.intervals import bootstrap
from scripts.parts.text_table import show


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--model", default="demo", help="as for moejax generate (default: demo)")
    parser.add_argument("--expert-budget", default="25%", help="default: 25%%")
    parser.add_argument(
        "--policy",
        default="lru",
        metavar="NAME",
        help="as in a grid's `policies`: lru, FILE.py:CLASS, … (default: lru)",
    )
    parser.add_argument(
        "--trace-arrays", default="", metavar="NAMES", help="as for moejax generate (default: none)"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: 8)")
    parser.add_argument("--pairs", type=int, default=200, help="of blocks (default: 200)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    args = parser.parse_args(arguments)
    positive(args, "batch", "pairs")
    result: dict[str, Any] = {
        "batch": args.batch,
        "policy": args.policy,
        "trace_arrays": args.trace_arrays,
        "load_average": os.getloadavg()[0],
    }
    result |= overhead(args)
    low, high = result["overhead_interval"]
    text = (
        f"a step of {args.batch} rows: {result['plain_ms']:.3f} ms without, "
        f"{result['traced_ms']:.3f} ms with a trace (medians); the main thread computes "
        f"{result['main_thread_us']:.0f} us more",
        f"overhead {result['overhead']:.2%} (median of {args.pairs} pairs of blocks of "
        f"{BATCH} steps, 95% interval {low:.2%} to {high:.2%}), policy {args.policy}, "
        f"{result['events']:.1f} decisions and transfers a step, load {result['load_average']:.1f}",
    )
    show(args.json, [result], text)
    return 0


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step with and without the tracer, alternating within one run."""
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(
            args.model,
            progress=False,
            expert_budget=args.expert_budget,
            max_num_seqs=args.batch,
            trace=Path(directory) / "trace",
            trace_arrays=args.trace_arrays.split(",") if args.trace_arrays else (),
            policies=arm_of(args.policy, Path.cwd()).policies,
        ) as llm,
    ):
        engine, tracer = llm.engine, llm.engine.tracer
        controller = None if engine.control is None else engine.control.controller
        events = 0

        def listen(event: Any) -> None:
            nonlocal events
            events += 1
            assert isinstance(tracer, Tracer)
            tracer.event(event)

        def trace(on: bool) -> None:
            engine.tracer = tracer if on else None
            if controller is not None:
                controller.listener = listen if on else None

        trace(False)
        room = engine.scheduler.max_model_len - 8
        if room < 4 * BATCH:
            raise UserError(f"max_model_len {room} is too short for this bench")
        times: dict[bool, list[float]] = {False: [], True: []}
        busy: dict[bool, list[float]] = {False: [], True: []}
        refill(engine, args.batch, room)
        steps(engine, 20)  # warm-up
        while len(times[True]) < args.pairs:
            first = len(times[True]) % 2 == 0
            shortest = min(room - len(r.output) for r in engine.scheduler.running.values())
            if shortest < 2 * BATCH + 4:
                engine.abort([*engine.scheduler.running.values()])
                refill(engine, args.batch, room)
            for traced in (first, not first):
                trace(traced)
                began = time.perf_counter(), time.thread_time()
                steps(engine, BATCH)
                times[traced].append((time.perf_counter() - began[0]) / BATCH)
                busy[traced].append((time.thread_time() - began[1]) / BATCH)
        trace(True)
        engine.abort([*engine.scheduler.running.values()])
        engine.drain()
        llm.close()
        written = read_trace(Path(directory) / "trace").steps
        if written < args.pairs * BATCH:
            raise UserError(f"the trace has {written} steps: the engine did not call its tracer")
    plain, traced = np.array(times[False]), np.array(times[True])
    ratios = traced / plain - 1
    return {
        "plain_ms": float(np.median(plain)) * 1e3,
        "traced_ms": float(np.median(traced)) * 1e3,
        "overhead": float(np.median(ratios)),
        "main_thread_us": float(np.median(np.array(busy[True]) - busy[False])) * 1e6,
        "overhead_interval": bootstrap(ratios),
        "events": events / (args.pairs * BATCH),
        "pairs": args.pairs,
        "block_steps": BATCH,
    }


def refill(engine: Engine, batch: int, room: int) -> None:
    """`batch` new sequences, until each of them decodes."""
    params = SamplingParams(temperature=1.0, max_tokens=room, ignore_eos=True)
    requests = [engine.add([5 + i, 6, 7], params) for i in range(batch)]
    while not all(request.output for request in requests):
        engine.step()


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
