"""MoEpic's half experts beside whole ones, in the simulator: time, hits and bytes of decode steps.

python -m scripts.bench split [--model DIR]

The model's own routing on prompts of three texts. Half of the steps choose the memory and the split
of each layer, and the others are played, once without and once with prefetches of what the next
layer's router says of this layer's input. Link and device are stated, and nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.simulate.split_experts import SplitConfig, configure, play_split
from host_offload.simulate.timeline import Link
from host_offload.sizing.miss_curves import gather_curves
from host_offload.traces.reader import read_trace
from moejax import LLM, SamplingParams, UserError
from moejax.evaluate.experiments.definition import TEXTS, text_path
from moejax.evaluate.experiments.sources.corpus import windows
from moejax.sizes import parse_rate
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

COLUMNS = (
    ("memory", "{memory:.0%}"),
    ("experts", "{name}"),
    ("tops", "{top}"),
    ("hits", "{hits:.1%}"),
    ("MB a step", "{mb:.2f}"),
    ("ms a step", "{ms:.2f}"),
    ("with prefetch: MB", "{ahead_mb:.2f}"),
    ("ms", "{ahead_ms:.2f}"),
)


class Routed(NamedTuple):
    """Decode steps of a model."""

    needed: np.ndarray
    """bool[T, L, E]"""
    predicted: np.ndarray
    """bool[T, L, E]: what the router of each layer says of the input of the layer before."""
    record_bytes: int


def route(args: argparse.Namespace) -> Routed:
    """Runs the prompts and returns what their decode steps routed."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        options = {"trace": f"{directory}/t,arrays=gate_input", "progress": False}
        limits = {"max_num_seqs": args.batch, "max_model_len": args.tokens + 64}
        with LLM(args.model, driver="host", prefetch="fate", **options, **limits) as llm:
            tokenizer = llm.get_tokenizer()
            assert tokenizer is not None and llm.engine.control is not None
            ids = {text: tokenizer.encode(text_path(text, Path()).read_text()) for text in TEXTS}
            prompts = [
                list(prompt)
                for turn in zip(*(windows(ids[t], args.batch, 32, t) for t in TEXTS), strict=True)
                for prompt in turn
            ]
            llm.generate(prompts, params, use_tqdm=False)
            router = llm.engine.control.controller.spec.router
            record = llm.plan.steps.layout.records[0].nbytes
        assert router is not None
        trace = read_trace(Path(directory) / "t")
        layers, experts, k = trace.header.layers, trace.header.experts, trace.header.top_k
        needed, predicted = [], []
        for step in trace.step_traces():
            if step.kind == "decode" and step.gate_input is not None:
                best = np.zeros((len(step.ids), layers, k), np.int64)
                for layer in range(1, layers):
                    said = gate_scores(step.gate_input[:, layer - 1], router[layer])
                    best[:, layer] = np.argsort(-said, axis=1, kind="stable")[:, :k]
                for chosen, into in ((step.ids, needed), (best, predicted)):
                    active = np.zeros((layers, experts), bool)
                    active[np.arange(layers)[:, None], chosen] = True
                    into.append(active)
    return Routed(np.array(needed), np.array(predicted), record)


def compare(routed: Routed, args: argparse.Namespace) -> list[dict[str, Any]]:
    rate, half = parse_rate(args.link_rate), len(routed.needed) // 2
    times = {"layer_s": args.layer_us / 1e6, "expert_s": args.expert_us / 1e6}
    given = {"record_bytes": routed.record_bytes, "link": Link(rate), **times}
    curves = gather_curves(((step,), True) for step in routed.needed[:half])
    assert curves is not None
    _, layers, experts = routed.needed.shape
    rows = []
    for memory in (float(part) for part in args.memories.split(",")):
        cells = round(memory * layers * experts)
        even = np.full(layers, cells // layers)
        load = routed.record_bytes / rate
        hidden = times["layer_s"] + times["expert_s"] * float(curves.references.mean()) / half
        chosen = configure(curves, cells, load_s=load, hidden_s=hidden)
        arms = {
            "whole": SplitConfig(even, np.ones(layers)),
            "half": SplitConfig(even, np.full(layers, 0.5)),
            "MoEpic": chosen,
        }
        for name, config in arms.items():
            steps, ahead = routed.needed[half:], routed.predicted[half:]
            alone = play_split(steps, config, **given)
            fetched = play_split(steps, config, predicted=ahead, **given)
            rows.append(
                {
                    "memory": memory,
                    "name": name,
                    "top": ", ".join(f"{top:g}" for top in np.unique(config.top)),
                    "hits": alone.hits / alone.needed,
                    "mb": alone.bytes / len(steps) / 1e6,
                    "ms": 1e3 * float(alone.seconds.mean()),
                    "ahead_mb": fetched.bytes / len(steps) / 1e6,
                    "ahead_ms": 1e3 * float(fetched.seconds.mean()),
                }
            )
    return rows


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default="demo", help="(default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences at once (default: %(default)s)")
    add("--tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    add("--memories", default="0.25,0.5", help="shares of the experts (default: %(default)s)")
    add("--link-rate", default="2GB/s", help="(default: %(default)s)")
    add("--layer-us", type=float, default=150, help="a layer without experts")
    add("--expert-us", type=float, default=40, help="an expert (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "batch", "tokens")
    shares = args.memories.split(",")
    if not all(part.replace(".", "", 1).isdigit() and 0 < float(part) <= 1 for part in shares):
        raise UserError(f"--memories are shares above 0 and up to 1, not {args.memories}")
    rows = compare(route(args), args)
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0
