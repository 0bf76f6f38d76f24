"""WiSP's Table 2: single-stream decode with so many cells a layer, against static layer offload.

python scripts/table2.py                          (Qwen3-30B-A3B, on a GPU)
python scripts/table2.py --layers 2 --steps 20    (a part of it, elsewhere)

Random weights of the shape, routing as published of Qwen3 (--routing), one engine; cells change
between rows by table contents. Each row compares two ways to use the same bytes:
  paged      every layer has so many cells, LRU
  static     as many whole layers as these bytes hold are resident; of the others every step reads
             the active experts through (measured)
  streamed   the same, but whole layers cross the link, as vLLM's --cpu-offload-gb moves them: the
             measured time with everything resident plus those bytes at the link's measured rate
             (predicted)
The paper's Table 2 (H100 NVL, vLLM 0.11.2, eager; its offload column is `streamed`) is beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from bench_engine import (
    add_options,
    check_fits,
    check_names,
    compiled_engine,
    no_compilation,
    parse_cells,
    random_weights,
)
from decode_timing import ROUTINGS, Samples, decode, forced_routings, prefill
from text_table import aligned

from host_offload.budget import BudgetError, Share
from moejax.device import select_device
from moejax.engine import Engine
from moejax.errors import UserError
from moejax.random_model import shape
from moejax.rates import measure_link_rate
from moejax.runner import Runner
from moejax.startup import Limits
from moejax.step import Routing

PUBLISHED = {16: (8.96, 13.79), 32: (10.27, 18.51), 64: (13.21, 25.75), 128: (26.53, 26.79)}
"""Cells of a layer → tokens a second of the paper's offload baseline and of WiSP (its Table 2)."""

SWEEP = 2048
"""Prompt tokens of the largest sweep, before the steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit status, 2 for a mistake that the message explains."""
    args = _parser().parse_args(argv)
    try:
        lines = run(args)
    except (UserError, BudgetError, MemoryError) as error:
        print(f"table2: error: {error}", file=sys.stderr)
        return 2
    for line in [json.dumps(line) for line in lines] if args.json else report(lines):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="table2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, cells="16,32,64,128")
    parser.set_defaults(shape="qwen3-30b-a3b")
    add = parser.add_argument
    add("--batch", type=int, default=1, help="sequences decoded at once (default: 1)")
    add("--routing", default="qwen3-like", help=f"{', '.join(ROUTINGS)} (default: %(default)s)")
    add("--context", type=int, default=128, help="tokens before the first step (%(default)s)")
    add("--steps", type=int, default=60, help="timed steps of each row (default: %(default)s)")
    add("--warmup", type=int, default=20, help="untimed steps before each repeat (%(default)s)")
    add("--repeats", type=int, default=5, help="rounds over all rows (default: %(default)s)")
    return parser


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each number of cells."""
    config = shape(args.shape, args.layers)
    cells = [c for c in parse_cells(args.cells, config.num_experts) if c]
    for name in ("batch", "context", "steps", "warmup", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.routing not in ROUTINGS:
        raise UserError(f"routing {args.routing!r} is unknown; choose {', '.join(ROUTINGS)}")
    if not cells:
        raise UserError("--cells must name at least one number above 0")
    check_names(args)
    each = -(-args.steps // args.repeats)
    covering = -(-config.num_experts // config.num_experts_per_tok)
    longest = args.context + 1 + max(args.warmup + each, covering)
    device = select_device()
    limits = Limits(
        enable_prefix_caching=False,
        max_num_seqs=args.batch,
        max_model_len=longest,
        max_num_batched_tokens=SWEEP,
        expert_budget=Share(1.0),
    )
    check_fits(args, config, device, config.num_experts, tokens=args.batch * longest, sweep=SWEEP)
    with (
        random_weights(args, config, device) as loaded,
        compiled_engine(args, loaded, device, limits) as engine,
    ):
        link = measure_link_rate(engine.runner)
        splits = splits_of(cells, sum(config.moe_layers), config.num_experts)
        samples = measure(args, engine, splits, each)
        return list(lines_of(args, engine, cells, splits, samples, link))


def splits_of(cells: Sequence[int], layers: int, experts: int) -> dict[str, list[int]]:
    """Cells of every layer: paged, and static at the same bytes, for each number of cells."""
    found = {"all": [experts] * layers}
    for c in cells:
        whole, rest = divmod(c * layers, experts)
        # What no whole layer fits into is not left to the paged arm alone.
        part = [rest] if whole < layers and rest else []
        found[f"paged {c}"] = [c] * layers
        found[f"static {c}"] = [experts] * whole + part + [0] * (layers - whole - len(part))
    return found


def measure(
    args: argparse.Namespace, engine: Engine, splits: dict[str, list[int]], each: int
) -> dict[str, Samples]:
    """Steps of every split, in interleaved rounds, with the same routing for all."""
    runner, random = engine.runner, np.random.default_rng(args.seed)
    vocabulary = runner.config.vocab_size
    prompts = random.integers(vocabulary, size=(args.batch, args.context)).tolist()
    samples = {name: Samples() for name in splits}
    total = args.repeats * (args.warmup + each)
    routings = forced_routings(args.routing, runner, args.batch, total, random)
    every = covering_routings(runner, args.batch)
    requests, sequences = prefill(engine, prompts, max(args.warmup + each, len(every)))
    arena = engine.scheduler.arena
    decode(runner, sequences, routings[:2], Samples())  # compiles what has not been
    with no_compilation(runner):
        for i in range(args.repeats):
            first = i * (args.warmup + each)
            middle, last = first + args.warmup, first + args.warmup + each
            for name, cells in splits.items():
                runner.grant_cells(arena.grant_cells(cells))
                # Every expert once, so that first sights are nobody's misses.
                decode(runner, sequences, every, Samples())
                decode(runner, sequences, routings[first:middle], Samples())
                decode(runner, sequences, routings[middle:last], samples[name])
    engine.abort(requests)
    return samples


def covering_routings(runner: Runner, batch: int) -> list[Routing | None]:
    """Steps whose rows go to every expert of every layer in turn."""
    layers, experts = runner.stores[0].shape[:2]
    rows, k = runner.shapes.bucket(batch), runner.config.num_experts_per_tok
    found: list[Routing | None] = []
    for first in range(0, experts, k):
        start = min(first, experts - k)
        ids = np.broadcast_to(np.arange(start, start + k, dtype=np.int32), (layers, rows, k))
        found.append(Routing(ids.copy(), np.full(ids.shape, 1 / k, np.float32)))
    return found


def lines_of(
    args: argparse.Namespace,
    engine: Engine,
    cells: Sequence[int],
    splits: dict[str, list[int]],
    samples: dict[str, Samples],
    link: float,
) -> Iterator[dict[str, Any]]:
    record, batch = engine.runner.layout.records[0].nbytes, args.batch
    experts = engine.runner.config.num_experts
    resident = float(np.median(samples["all"].step_s))
    for c in cells:
        paged, static = (samples[f"{way} {c}"] for way in ("paged", "static"))
        missing = sum(experts - n for n in splits[f"static {c}"])
        streamed = resident + missing * record / link
        rates = {
            "paged": batch / float(np.median(paged.step_s)),
            "static": batch / float(np.median(static.step_s)),
            "streamed": batch / streamed,
        }
        whole = engine.runner.config.num_hidden_layers == 48
        yield {
            "shape": args.shape,
            "layers": engine.runner.config.num_hidden_layers,
            "device": engine.runner.device.device_kind,
            "routing": args.routing,
            "batch": batch,
            "cells": c,
            "expert_bytes": c * len(splits["all"]) * record,
            "steps": len(paged.step_s),
            "link_gb_per_s": link / 1e9,
            **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
            "paged_misses": _misses(paged),
            "static_misses": _misses(static),
            "streamed_experts": missing,
            "paged_over_static": rates["paged"] / rates["static"],
            "paged_over_streamed": rates["paged"] / rates["streamed"],
            "published": PUBLISHED.get(c) if whole and args.shape == "qwen3-30b-a3b" else None,
        }


def _misses(samples: Samples) -> float:
    """Of a step, all layers together."""
    counts = np.array(samples.fills) + np.array(samples.read_through)
    return float(counts.sum(axis=1).mean())


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    first = lines[0]
    yield (
        f"{first['shape']}, {first['layers']} layers, {first['device']}, routing "
        f"{first['routing']}, batch {first['batch']}, link {first['link_gb_per_s']:.1f} GB/s, "
        f"{first['steps']} steps a row; tokens a second"
    )
    shown = []
    for line in lines:
        offload, wisp = line["published"] or (None, None)
        ratio = f"{wisp / offload:.2f} ({offload} → {wisp})" if offload and wisp else "–"
        shown.append({**line, "gib": line["expert_bytes"] / 2**30, "paper": ratio})
    yield from aligned(
        [
            ("cells", "{cells}"),
            ("experts GiB", "{gib:.2f}"),
            ("paged", "{paged_tokens_per_s:.2f}"),
            ("misses", "{paged_misses:.1f}"),
            ("static", "{static_tokens_per_s:.2f}"),
            ("misses", "{static_misses:.1f}"),
            ("streamed (predicted)", "{streamed_tokens_per_s:.2f}"),
            ("paged/static", "{paged_over_static:.2f}"),
            ("paged/streamed", "{paged_over_streamed:.2f}"),
            ("paper: WiSP/offload", "{paper}"),
        ],
        shown,
    )


if __name__ == "__main__":
    sys.exit(main())
