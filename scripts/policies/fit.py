"""Fits every policy that learns to the same run, into files that grids name as NAME=FILE.

python -m scripts.policies fit DIR [--model demo] [--texts story,math,code] [--share 0.7]

A run of the model over windows of the first 60% of each text (docs/protocol.md, 1) is recorded to
DIR/trace, with router inputs, probabilities and embeddings, where it is not there yet. DIR gets a
file of each policy that learns, `expert_map` one of each tracker that does; --share: the part of
the requests that fills expert maps and counts (the paper's 7:3), the others learn from all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from host_offload.policies.prefetch.expert_map import policy as expert_map
from host_offload.policies.prefetch.expert_map.trackers import TRACKERS
from host_offload.policies.prefetch.names import FIT
from host_offload.policies.prefetch.promoe import policy as promoe
from host_offload.policies.prefetch.promoe.network import Training
from host_offload.traces.reader import Trace, TraceError, read_trace
from moejax import LLM, SamplingParams, UserError
from moejax.evaluate.experiments.sources.corpus import TRAIN, text_path, windows
from scripts.parts.commands import new_parser, refuse
from scripts.parts.workloads import text_corpus

SUFFIX = ".safetensors"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    sizes = args.sequences, args.prompt_tokens, args.tokens, args.batch, args.capacity, args.hidden
    if min(sizes) < 1:
        return refuse(__name__, "sizes must be at least 1")
    try:
        trace = recorded(args)
        for name, policy in fits(trace, args):
            path = args.directory / f"{name}{SUFFIX}"
            policy.fitted.write(path)
            print(f"{path}: {policy.fitted.nbytes} bytes")
    except (UserError, TraceError, ValueError) as error:
        return refuse(__name__, error)
    return 0


def fits(trace: Trace, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name of a file, policy) of all that learns."""
    for name, fit in FIT.items():
        if name == promoe.NAME:
            yield name, promoe.fit(trace, training=Training(hidden=args.hidden))
        elif name != expert_map.NAME:
            yield name, fit(trace)
    for tracker in TRACKERS:
        if tracker != "speculate":
            settings = {"capacity": args.capacity, "distance": args.distance, "share": args.share}
            yield (
                f"{expert_map.NAME}-{tracker}",
                expert_map.fit(trace, tracker=tracker, **settings),
            )


def recorded(args: argparse.Namespace) -> Trace:
    """The run's trace, recorded if it is not there."""
    directory = args.directory / "trace"
    if not directory.exists():
        args.directory.mkdir(parents=True, exist_ok=True)
        with LLM(
            args.model,
            max_num_seqs=args.batch,
            max_model_len=-(-(args.prompt_tokens + args.tokens) // 64) * 64,
            progress=False,
            trace=directory,
            trace_arrays=["gate_input", "probs", "embedding"],
        ) as llm:
            tokenizer: Any = llm.get_tokenizer()
            paths = [str(text_path(text, Path.cwd())) for text in args.texts.split(",")]
            corpus = text_corpus(paths, lambda text: tokenizer(text)["input_ids"])
            prompts = [
                window
                for name, ids in corpus.items()
                for window in windows(ids.tolist(), args.sequences, args.prompt_tokens, name, TRAIN)
            ]
            params = [
                SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=seed)
                for seed in range(len(prompts))
            ]
            llm.generate(prompts, params, use_tqdm=False)
    trace = read_trace(directory)
    if not trace.complete:
        raise UserError(f"{directory} is of a run that did not end; delete it")
    return trace


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="demo", help="default: demo")
    parser.add_argument("--texts", default="story,math,code", help="default: story,math,code")
    sizes = (("sequences", 16), ("prompt-tokens", 64), ("tokens", 64), ("batch", 4))
    for name, value in (*sizes, ("capacity", 1000), ("distance", 3), ("hidden", 128)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--share", type=float, default=0.7, help="default: 0.7")
    return parser
