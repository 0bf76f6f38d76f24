"""What a trace costs: microseconds a record, and the share of the run time it adds.

python -m scripts.bench trace [--batch 8] [--pairs 200] [--policy examples/recent_prefetch.py]

A run decodes `batch` sequences; blocks of steps with and without the tracer alternate (ABBA), so
that both see the same machine and the same context lengths, and every traced block copies its
records once. The overhead is the median over pairs of blocks with its 95% interval (bootstrap); the
main thread's own seconds, which other processes change less, are compared as well. With a policy
both kinds of blocks run it; its decisions and transfers are a part of the trace. The records' own
cost is measured apart, on made-up ones, for two models' sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Policy
from host_offload.control.step_record import USES, StepRecord
from host_offload.memory.budget import BudgetError
from host_offload.policies.eviction.names import POLICIES
from host_offload.traces.reader import TraceHeader, read_trace
from host_offload.traces.writer import TraceWriter
from moejax import LLM, SamplingParams, UserError
from moejax.engine.loop import Engine
from moejax.traces.tracer import BATCH, Tracer
from scripts.parts.commands import new_parser, refuse

SIZES = {"demo": (4, 16, 4), "qwen3-30b-a3b": (48, 128, 8)}
"""Model → MoE layers, experts, experts a token."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--model", default="demo", help="as for moejax generate (default: demo)")
    parser.add_argument("--expert-budget", default="25%", help="default: 25%%")
    parser.add_argument(
        "--policy",
        default="lru",
        metavar="NAME",
        help=f"{', '.join(POLICIES)}, or a file of Python that has one (default: lru)",
    )
    parser.add_argument(
        "--trace-arrays", default="", metavar="NAMES", help="as for moejax generate (default: none)"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: 8)")
    parser.add_argument("--pairs", type=int, default=200, help="of blocks (default: 200)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    args = parser.parse_args(arguments)
    try:
        if min(args.batch, args.pairs) < 1:
            raise UserError("--batch and --pairs must be at least 1")
        result: dict[str, Any] = {
            "batch": args.batch,
            "policy": args.policy,
            "trace_arrays": args.trace_arrays,
            "load_average": os.getloadavg()[0],
        }
        result["record_us"] = {
            name: record_us(*size, rows=args.batch) for name, size in SIZES.items()
        }
        result |= overhead(args)
    except (UserError, BudgetError) as error:
        return refuse(__name__, error)
    if args.json:
        print(json.dumps(result))
        return 0
    for name, us in result["record_us"].items():
        print(f"a record of {args.batch} rows, {name}: {us:.1f} us")
    print(
        f"a step of {args.batch} rows: {result['plain_ms']:.3f} ms without, "
        f"{result['traced_ms']:.3f} ms with a trace (medians); the main thread computes "
        f"{result['main_thread_us']:.0f} us more"
    )
    low, high = result["overhead_interval"]
    print(
        f"overhead {result['overhead']:.2%} (median of {args.pairs} pairs of blocks of "
        f"{BATCH} steps, 95% interval {low:.2%} to {high:.2%}), policy {args.policy}, "
        f"{result['events']:.1f} decisions and transfers a step, load {result['load_average']:.1f}"
    )
    return 0


def load_policy(name: str) -> dict[str, Any]:
    """Options of LLM for --policy. Raises UserError for what is neither a name nor a file with one
    policy."""
    if name in POLICIES:
        return {"eviction": name}
    try:
        found = runpy.run_path(name)
    except OSError as error:
        raise UserError(
            f"--policy {name}: {error.strerror}; it is one of {', '.join(POLICIES)}, or a file"
        ) from error
    own = [
        value
        for value in found.values()
        if dataclasses.is_dataclass(value) and value.__module__ == "<run_path>"
    ]
    policies: list[Policy] = [value() for value in own if hasattr(value, "decide")]  # type: ignore
    if len(policies) != 1:
        raise UserError(f"--policy {name} has {len(policies)} policies, it must have one")
    return {"policies": policies}


def record_us(layers: int, experts: int, top_k: int, rows: int, steps: int = 3000) -> float:
    """Microseconds of Tracer.after_read for a made-up record, the writing of chunks included."""
    rng = np.random.default_rng(0)
    none = np.zeros(layers, np.int32)
    record = StepRecord(
        number=0,
        kind="decode",
        start_s=0.0,
        read_s=1.0,
        seconds=0.0,
        rows=rows,
        compiled=False,
        request=np.arange(rows, dtype=np.int32),
        user=np.full(rows, -1, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.ones(rows, np.uint8),
        ids=rng.integers(experts, size=(rows, layers, top_k)).astype(np.int16),
        weights=rng.random((rows, layers, top_k), dtype=np.float32),
        hits=none,
        fills=none,
        read_through=none,
        waves=none.astype(np.int16),
        missed=rng.random((layers, experts)) < 0.5,
        bytes=np.zeros(3, np.int64),
        use=np.zeros(len(USES), np.int64),
        finished=(),
    )
    header = TraceHeader(
        layers, experts, top_k, config_digest="", spec={}, machine={}, command=[], created=""
    )
    with tempfile.TemporaryDirectory() as directory:
        tracer = Tracer(TraceWriter(Path(directory) / "trace", header))
        began = time.perf_counter()
        for _ in range(steps):
            tracer.after_read(record)
        seconds = time.perf_counter() - began
        tracer.close()
    return seconds / steps * 1e6


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
            **load_policy(args.policy),
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
    drawn = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    return {
        "plain_ms": float(np.median(plain)) * 1e3,
        "traced_ms": float(np.median(traced)) * 1e3,
        "overhead": float(np.median(ratios)),
        "main_thread_us": float(np.median(np.array(busy[True]) - busy[False])) * 1e6,
        "overhead_interval": np.percentile(medians, [2.5, 97.5]).tolist(),
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
