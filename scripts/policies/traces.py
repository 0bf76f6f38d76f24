"""Routing that the command `compare` looks at: recorded by the engine, or generated."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import StepRecord
from host_offload.traces.generators import RoutedTokens, RoutingGenerator, routing_generator
from host_offload.traces.reader import KINDS, Trace, read_trace
from moejax import LLM, SamplingParams, UserError
from moejax.traces.generated import PRESENT, new_trace, routed_step, routing_header
from scripts.parts.workloads import text_corpus

TRAIN, TEST = (0.0, 0.6), (0.8, 1.0)
"""Contiguous parts of a text; what is between them is for tuning, and nothing is tuned here."""
EXPERT_BYTES = 9 * 2**20
"""An expert of generated routing: Qwen3-30B-A3B's."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Routing to compare policies on: one domain of one model, with prompts of one length."""

    name: str
    context: str
    train: Trace
    test: Mapping[int, Trace]
    """By batch size."""
    router: Path | None = None
    """A file of float32[L, D, E]; None: generated routing, which has no gate inputs either."""


def recorded(args: argparse.Namespace) -> Iterator[Source]:
    """The model over each text, with short prompts and with long ones."""
    if not args.text:
        return
    names = [Path(text).stem for text in args.text]
    if len({*names}) < len(names):
        raise UserError(f"texts must have different names, not {', '.join(names)}")
    train: Trace | None = None
    router: Path | None = None
    for prompt in (args.prompt_tokens, args.long_prompt_tokens):
        if not prompt:
            continue
        size = f"{args.sequences}x{prompt}+{args.tokens}"
        root = args.directory / f"{Path(args.model).name}-{size}-rows{max(args.batches)}"
        root.mkdir(parents=True, exist_ok=True)
        most = max(args.batches)
        if train is None:
            train = recorded_trace(args, root / "train", args.text, TRAIN, most, prompt)
            router = root / "router.npy"
        for name, text in zip(names, args.text, strict=True):
            test = {}
            for batch in args.batches:
                # In all batches the same tokens, or at the smallest ones some of them.
                most_sequences = max(args.steps * batch // args.tokens, batch)
                chosen = range(0, args.sequences, -(-args.sequences // most_sequences))
                directory = root / f"{name}-batch{batch}-of{len(chosen)}"
                test[batch] = recorded_trace(args, directory, [text], TEST, batch, prompt, chosen)
            yield Source(name, f"{prompt} tokens", train, test, router)


def recorded_trace(
    args: argparse.Namespace,
    directory: Path,
    texts: Sequence[str],
    part: tuple[float, float],
    batch: int,
    prompt: int,
    chosen: range | None = None,
) -> Trace:
    """The trace there, recorded if it is not: `sequences` windows of each text as prompts of
    `prompt` tokens, of which `chosen` run, `batch` at a time. Decode rows are those of the largest
    batch, so all batches sample the same tokens."""
    if directory.exists():
        trace = read_trace(directory)
        if not trace.complete:
            raise UserError(f"{directory} is of a run that did not end; delete it")
        return trace
    length = prompt + args.tokens
    with LLM(
        args.model,
        max_num_seqs=max(args.batches),
        max_model_len=-(-length // 64) * 64,
        progress=False,
        trace=directory,
        trace_arrays=["gate_input"],
    ) as llm:
        tokenizer: Any = llm.get_tokenizer()
        corpus = text_corpus(texts, lambda text: tokenizer(text)["input_ids"])
        prompts = [
            window
            for ids in corpus.values()
            for window in windows(ids, part, args.sequences, prompt)
        ]
        running = range(len(prompts)) if chosen is None else chosen
        for first in range(0, len(running), batch):
            now = running[first : first + batch]
            params = [SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=i) for i in now]
            llm.generate([prompts[i] for i in now], params, use_tqdm=False)
        np.save(directory.parent / "router.npy", routers(llm))
    return read_trace(directory)


def windows(ids: np.ndarray, part: tuple[float, float], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, spread evenly over a part of a text. Raises UserError for
    a part that is too short."""
    begin, end = (int(share * len(ids)) for share in part)
    if end - length < begin:
        raise UserError(
            f"tokens {begin}…{end} of a text have no room for a prompt of {length}; give a longer "
            "text or fewer --prompt-tokens"
        )
    starts = np.linspace(begin, end - length, count).astype(int)
    return [ids[start : start + length].tolist() for start in starts]


def routers(llm: LLM) -> np.ndarray:
    """float32[L, D, E]"""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(llm.engine.runner.state)
    found = [np.asarray(x, np.float32) for at, x in leaves if "router" in jax.tree_util.keystr(at)]
    return np.swapaxes(np.concatenate(found), 1, 2)


def generated(args: argparse.Namespace, shared: float) -> Source:
    """qwen3-like routing: of each sequence `tokens`·4 tokens to learn from, as many to report after
    a prefill step of the last `prompt_tokens` before them."""
    tokens, most = 4 * args.tokens, max(args.batches)
    try:
        kind = routing_generator("qwen3-like", args.layers)
        generator = dataclasses.replace(kind, shared=shared)
    except ValueError as error:
        raise UserError(str(error)) from error
    origin = {
        **dataclasses.asdict(generator),
        "generator": "qwen3-like",
        "seed": 0,
        "driver": "device",
        "hidden": 2048,
        "version_bytes": {"dense": EXPERT_BYTES},
        "page_bytes": EXPERT_BYTES,
        "page_tokens": 16,
        "slots": generator.layers * generator.experts + 1,
        "slot_bytes": EXPERT_BYTES,
        "shapes": {"blocks": 1},
    }
    header = routing_header(generator.layers, generator.experts, generator.top_k, PRESENT, origin)
    root = (
        args.directory
        / f"qwen3-like-{args.layers}x{2 * tokens}-shared{shared:g}-prompt{args.prompt_tokens}"
    )
    wanted = {"train": most, **{f"batch{b}": b for b in args.batches}}
    paths = {name: root / f"{name}-of{most}" for name in wanted}
    root.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        if not path.exists():
            first = 0 if name == "train" else tokens
            prompt = 0 if name == "train" else min(args.prompt_tokens, first)
            with new_trace(path, header) as writer:
                for step in generated_steps(generator, wanted[name], first, tokens, prompt):
                    writer.append(step)
    test = {batch: read_trace(paths[f"batch{batch}"]) for batch in args.batches}
    name, context = f"qwen3-like, shared {shared:g}", "generated"
    return Source(name, context, read_trace(paths["train"]), test)


def generated_steps(
    generator: RoutingGenerator, rows: int, first: int, tokens: int, prompt: int
) -> Iterator[StepRecord]:
    """Decode steps of tokens `first`… of `rows` sequences. Before them one prefill step of the
    `prompt` tokens that come before, so that what is resident is not nothing."""
    prefilled: list[RoutedTokens] = []
    for token, routed in enumerate(generator.steps(rows, first + tokens)):
        prefill = token < first
        if prefill:
            prefilled += [routed] if token >= first - prompt else []
            if not prefilled or token < first - 1:
                continue
        chosen = prefilled if prefill else [routed]
        numbers = np.tile(np.arange(rows, dtype=np.int32), len(chosen))
        yield routed_step(
            token - first + (prompt > 0),
            np.concatenate([x.ids for x in chosen]),
            weights=np.concatenate([x.weights for x in chosen]),
            kind=KINDS[not prefill],
            request=numbers,
            position=np.repeat(np.arange(token + 1 - len(chosen), token + 1), rows),
            phase=np.full(len(numbers), not prefill, np.uint8),
        )
