"""WiSP's Table 2 as a race: paging with LRU beside static layers of the same bytes, over a link.

python -m scripts.bench layers [--model DIR] [--link-rate 200MB/s]

Static layers are the last ones whole and no cell in the others, whose experts are then read from
the store in every step (vLLM's --cpu-offload-gb); paging gives as many cells to each layer. With
all layers whole, the other arm is a build without tables, whose experts are computed in the store:
what paging itself costs, also as instructions of both decode programs. Two engines live at once,
and one sequence decodes by turns in each; the fastest of --runs counts. A ratio is the median over
the rounds, with its 95% interval (fewer than six rounds: the least and the most); many short rounds
tell more than few long ones, since a machine's speed drifts. CPU is the process's CPU time a token.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax import LLM, SamplingParams, UserError
from moejax.evaluate.experiments.records import LEAST_REPEATS, median_interval
from moejax.models.config import load_config
from moejax.models.hub import model_directory
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

COLUMNS = (
    ("layers resident", "{whole} of {layers}"),
    ("static tok/s", "{static:.1f}"),
    ("LRU tok/s", "{lru:.1f}"),
    ("LRU / static", "{ratio:.3f} [{low:.3f}, {high:.3f}]"),
    ("CPU of a token, LRU / static", "{cpu:.3f} [{cpu_low:.3f}, {cpu_high:.3f}]"),
    ("instructions", "{instructions}"),
)


@contextlib.contextmanager
def start(args: argparse.Namespace, cells: Sequence[int] | None) -> Iterator[LLM]:
    """Starts an engine with so many cells in each layer, or without tables (None), and fills its
    cells. Raises UserError if steps have tables all the same."""
    held: dict[str, Any] = {"expert_budget": "100%"}
    if cells is not None:
        transfers = f"queue,rate={args.link_rate},latency=20us"
        held = {"cells": [*cells], "transfers": transfers}
    limits = {"max_num_seqs": 1, "max_model_len": args.tokens + 64, "progress": False}
    with LLM(args.model, device="cpu", **held, **limits) as llm:
        if cells is None and not llm.plan.steps.in_place:
            raise UserError(f"no steps without tables here: {llm.plan.budget.notes}; use --whole")
        decode(args, llm)
        yield llm


class Speed(NamedTuple):
    """The fastest of some runs."""

    tokens_per_s: float
    cpu_s: float
    """CPU seconds of the process for a token, with the prompt's part."""


def decode(args: argparse.Namespace, llm: LLM) -> Speed:
    """Decodes one sequence, --runs times."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    runs = []
    for _ in range(args.runs):
        began = time.process_time()
        (output,) = llm.generate("The old house", params, use_tqdm=False)
        cpu_s, times = time.process_time() - began, output.metrics
        assert times.finished_s is not None and times.first_token_s is not None
        runs.append((times.finished_s - times.first_token_s, cpu_s))
    seconds, cpu_s = np.min(runs, axis=0)
    return Speed((args.tokens - 1) / seconds, cpu_s / args.tokens)


def instructions(llm: LLM) -> int:
    """Returns the instructions of the compiled decode step, those of its loops once."""
    compiler = llm.engine.runner.compiler
    found = {
        key: str(one.as_text()).count(" = ")
        for key, one in zip(compiler.keys, compiler.compiled, strict=True)
        if key.kind == "decode"
    }
    return min(found.values())


def ends(ratios: np.ndarray) -> tuple[float, float]:
    """Returns the ends of the median's 95% interval, or of all values if they are too few."""
    if len(ratios) < LEAST_REPEATS:
        return float(ratios.min()), float(ratios.max())
    low, high = median_interval(ratios.tolist())
    return low, high


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default="demo", help="the model (default: %(default)s)")
    add("--link-rate", default="200MB/s", help="rate of the stated link (default: %(default)s)")
    add("--whole", help="whole layers, such as 1,3,5 (default: from 1 to all)")
    add("--tokens", type=int, default=128, help="tokens of a run (default: %(default)s)")
    add("--runs", type=int, default=3, help="runs of an arm in a round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "tokens", "runs", "rounds")
    config = load_config(model_directory(args.model))
    layers, experts = sum(config.moe_layers), config.num_experts
    rows = []
    counts = range(1, layers + 1)
    for whole in counts if args.whole is None else map(int, args.whole.split(",")):
        if whole not in counts:
            raise UserError(f"--whole: the model has {layers} layers, not {whole}")
        static = None if whole == layers else [0] * (layers - whole) + [experts] * whole
        arms = static, [experts * whole // layers] * layers
        found = np.empty((args.rounds, 2, len(Speed._fields)))
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(start(args, arm)) for arm in arms]
            for turn in range(args.rounds):
                for arm in sorted((0, 1), reverse=turn % 2 == 1):
                    found[turn, arm] = decode(args, engines[arm])
            counts_of = " / ".join(str(instructions(each)) for each in reversed(engines))
        ratios = found[:, 1] / found[:, 0]
        ratio, cpu = np.median(ratios, axis=0).tolist()
        (low, high), (cpu_low, cpu_high) = (ends(each) for each in ratios.T)
        static, lru = np.median(found[:, :, 0], axis=0).tolist()
        row = {"whole": whole, "layers": layers, "static": static, "lru": lru}
        row |= {"ratio": ratio, "low": low, "high": high, "instructions": counts_of}
        rows.append(row | {"cpu": cpu, "cpu_low": cpu_low, "cpu_high": cpu_high})
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0
