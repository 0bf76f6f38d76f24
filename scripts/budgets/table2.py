"""WiSP's Table 2: single-stream decode with so many cells a layer, against static layer offload.

python -m scripts.budgets table2                (Qwen3-30B-A3B, on a GPU)
python -m scripts.budgets table2 --layers 2     (a part of it, elsewhere: some minutes on two cores,
6 GiB)

Random weights of the shape, routing as published of Qwen3 (--routing), one engine; cells change
between rows by table contents. Each row compares two ways to use the same bytes:
  paged      every layer has so many cells, LRU
  static     as many whole layers as these bytes hold are resident; of the others every step reads
             the active experts through (measured)
  streamed   the same, but whole layers cross the link, as the paper describes vLLM's
             --cpu-offload-gb: the measured time with everything resident plus those bytes at the
             link's measured rate (predicted)
Beside them what the cost model says of paged: misses by the routing's miss curve, exact where the
cells hold a step's experts, and the resident time plus those misses at the link's measured rate.
With --layers N the vocabulary is cut as the layers are, unless --vocab says otherwise, so that the
head keeps its share of a step. What ran on a CPU says so; it is no claim about a GPU.

The whole model beside the paper's own columns is predicted by `moejax ablate
scripts/experiments/budgets/table2.yaml`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.sizing.miss_curves import CurveCounts, MissCurves
from moejax.checkpoints.random_model import shape
from moejax.costs.rates import measure_link_rate
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.model_config import ModelConfig
from moejax.step.parts import Routing
from moejax.step.runner import Runner
from scripts.parts.bench_engine import (
    add_options,
    check_names,
    decode_engine,
    no_compilation,
    parse_cells,
)
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.decode_timing import ROUTINGS, Samples, decode, forced_routings, prefill
from scripts.parts.text_table import aligned, show

COUNTS = {"steps": (60, 20), "warmup": (20, 8), "repeats": (5, 2)}
"""Defaults on a GPU, and elsewhere."""


@refusing(MemoryError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.routing not in ROUTINGS:
        raise UserError(f"routing {args.routing!r} is unknown; choose {', '.join(ROUTINGS)}")
    lines = run(args)
    show(args.json, lines, report(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add_options(parser, cells="16,32,64,128")
    parser.set_defaults(shape="qwen3-30b-a3b")
    add = parser.add_argument
    add("--batch", type=int, default=1, help="sequences decoded at once (default: 1)")
    add("--routing", default="qwen3-like", help=f"{', '.join(ROUTINGS)} (default: %(default)s)")
    add("--context", type=int, default=128, help="tokens before the first step (%(default)s)")
    for name, text in (
        ("steps", "timed steps of each row"),
        ("warmup", "untimed steps before each repeat"),
        ("repeats", "rounds over all rows"),
    ):
        gpu, cpu = COUNTS[name]
        add(f"--{name}", type=int, help=f"{text} (default: {gpu} on a GPU, else {cpu})")
    add("--vocab", type=int, help="tokens of the vocabulary (default: the layers' share)")
    return parser


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each number of cells."""
    config = part_of(args)
    device = select_device()
    for name, counts in COUNTS.items():
        if getattr(args, name) is None:
            setattr(args, name, counts[device.platform == "cpu"])
    cells = [c for c in parse_cells(args.cells, config.num_experts) if c]
    positive(args, "batch", "context", *COUNTS)
    if not cells:
        raise UserError("--cells must name at least one number above 0")
    check_names(args)
    each = -(-args.steps // args.repeats)
    covering = -(-config.num_experts // config.num_experts_per_tok)
    longest = args.context + 1 + max(args.warmup + each, covering)
    arena = [config.num_experts]
    with decode_engine(args, config, device, arena, rows=args.batch, longest=longest) as engine:
        link = measure_link_rate(engine.runner)
        splits = splits_of(cells, sum(config.moe_layers), config.num_experts)
        samples, curves = measure(args, engine, splits, each)
        return list(lines_of(args, engine, cells, splits, samples, curves, link))


def part_of(args: argparse.Namespace) -> ModelConfig:
    """The shape, with --layers of its layers and --vocab, or the same share, of its vocabulary."""
    whole, config = shape(args.shape), shape(args.shape, args.layers)
    vocab, layers = whole.vocab_size, config.num_hidden_layers
    if args.vocab is not None:
        vocab = args.vocab
    elif layers < whole.num_hidden_layers:
        vocab = max(-(-vocab * layers // whole.num_hidden_layers), 1024)
    if not 2 <= vocab <= whole.vocab_size:
        raise UserError(f"--vocab must be in 2…{whole.vocab_size}, got {vocab}")
    return dataclasses.replace(config, vocab_size=vocab)


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
) -> tuple[dict[str, Samples], MissCurves | None]:
    """Steps of every split, in interleaved rounds, with the same routing for all; and the miss
    curves of the timed ones (None: the routing is the model's own)."""
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
    if args.routing == "real":
        return samples, None
    counts = CurveCounts(*runner.stores[0].shape[:2])
    for number in range(total):
        in_round = number % (args.warmup + each)
        if not in_round:
            for routing in every:
                counts.add(active_set(counts.items, routing, sequences.rows), counted=False)
        timed = in_round >= args.warmup
        counts.add(active_set(counts.items, routings[number], sequences.rows), counted=timed)
        if timed:
            counts.end_step()
    return samples, counts.curves()


def active_set(experts: int, routing: Routing | None, rows: Sequence[int]) -> np.ndarray:
    """bool[L, E]: who is active in a forced step of these rows."""
    assert routing is not None
    ids = np.asarray(routing.ids)[:, list(rows)]
    active = np.zeros((len(ids), experts), bool)
    np.put_along_axis(active, ids.reshape(len(ids), -1), True, axis=1)
    return active


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
    curves: MissCurves | None,
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
        misses = None if curves is None else float(curves.misses[:, c].sum() / curves.steps)
        predicted = None if misses is None else batch / (resident + misses * record / link)
        yield {
            "shape": args.shape,
            "layers": engine.runner.config.num_hidden_layers,
            "vocab": engine.runner.config.vocab_size,
            "device": engine.runner.device.device_kind,
            "routing": args.routing,
            "batch": batch,
            "cells": c,
            "expert_gib": c * len(splits["all"]) * record / 2**30,
            "steps": len(paged.step_s),
            "link_gb_per_s": link / 1e9,
            **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
            "resident_tokens_per_s": batch / resident,
            "paged_predicted_tokens_per_s": predicted,
            "paged_misses": _misses(paged),
            "paged_predicted_misses": misses,
            "static_misses": _misses(static),
            "streamed_experts": missing,
            "paged_over_static": rates["paged"] / rates["static"],
            "paged_over_streamed": rates["paged"] / rates["streamed"],
        }


def _misses(samples: Samples) -> float:
    """Misses of a step, all layers together."""
    counts = np.array(samples.fills) + np.array(samples.read_through)
    return float(counts.sum(axis=1).mean())


MEASURED = (
    ("cells", "{cells}"),
    ("experts GiB", "{expert_gib:.2f}"),
    ("paged", "{paged_tokens_per_s:.2f}"),
    ("predicted", "{paged_predicted_tokens_per_s:.2f}"),
    ("misses", "{paged_misses:.1f}"),
    ("by curve", "{paged_predicted_misses:.1f}"),
    ("static", "{static_tokens_per_s:.2f}"),
    ("misses", "{static_misses:.1f}"),
    ("streamed (predicted)", "{streamed_tokens_per_s:.2f}"),
    ("paged/static", "{paged_over_static:.2f}"),
    ("paged/streamed", "{paged_over_streamed:.2f}"),
)


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "{shape}, {layers} layers, vocabulary {vocab}, measured on {device}, routing {routing}, "
        "batch {batch}, link {link_gb_per_s:.1f} GB/s, {steps} steps a row; tokens a second, "
        "with everything resident {resident_tokens_per_s:.2f}".format(**lines[0])
    )
    yield from aligned(MEASURED, lines)
