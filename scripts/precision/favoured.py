"""What routers that favour residents (cache_aware_routing) cost in quality, beside the hit rate.

python -m scripts.precision favoured MODEL [--text FILE ...] [--deltas 0,0.05,0.2] [--rows 1,16]

Texts are decoded token by token, each step given the text's own token whatever the model would say
(teacher forcing), since a prefill step of 64 tokens needs almost all experts anyway. Sequences are
cut from a text one after the other; the first tokens of each are its prompt. Before the deltas a
run with all experts resident; agreement is with its likeliest token, at each place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax import LLM, SamplingParams
from moejax.engine.step_work import Step
from moejax.errors import UserError
from moejax.step.experts import Paging
from scripts.parts.commands import new_parser, refusing
from scripts.parts.text_table import aligned

COLUMNS = [
    ("rows", "{rows}"),
    ("DELTA", "{delta}"),
    ("hit rate", "{hit_rate:.1%}"),
    ("missed a token", "{missed_per_token:.2f}"),
    ("perplexity", "{perplexity:.3f}"),
    ("change", "{change:+.2%}"),
    ("same likeliest", "{agreement:.1%}"),
    ("tokens", "{tokens}"),
]


class Decoded(NamedTuple):
    """What a run said at each place of all sequences, in their order."""

    nll: np.ndarray
    """float64[N, T]: of the text's tokens, nats."""
    likeliest: np.ndarray
    """int64[N, T]"""
    paging: Paging
    """Sums over decode steps and layers."""


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    deltas = [_number(text) for text in args.deltas.split(",")]
    rows = []
    for count in args.rows.split(","):
        options: dict[str, Any] = {
            **dict(max_num_seqs=int(count), max_model_len=-(-args.tokens // 64) * 64),
            **dict(max_num_batched_tokens=256, enable_prefix_caching=False, progress=False),
        }
        with LLM(args.model, **options) as llm:
            sequences = sequences_of(llm, args.text, args.sequences, args.tokens)
            base = decoded(llm, sequences, args.prompt)
        for delta in deltas:
            given = {"expert_budget": args.budget, "cache_aware_routing": delta}
            with LLM(args.model, **options, **given, eviction=args.eviction) as llm:
                rows.append(_row(int(count), delta, decoded(llm, sequences, args.prompt), base))
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print(*aligned(COLUMNS, rows), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--text", nargs="+", type=Path, required=True, metavar="FILE")
    add("--deltas", default="0,0.02,0.05,0.1,0.2", help="default: %(default)s")
    add("--rows", default="1,16", help="sequences at once (default: %(default)s)")
    add("--budget", default="25%", help="of the experts (default: %(default)s)")
    add("--eviction", default="lru", help="default: %(default)s")
    add("--sequences", type=int, default=16, help="of each text (default: %(default)s)")
    add("--tokens", type=int, default=128, help="of a sequence (default: %(default)s)")
    add("--prompt", type=int, default=16, help="of them its prompt (default: %(default)s)")
    add("--json", action="store_true")
    return parser


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--deltas are numbers such as 0,0.05, not {text!r}") from None


def sequences_of(llm: LLM, texts: Sequence[Path], count: int, tokens: int) -> list[list[int]]:
    """The first sequences of so many tokens of each text. Raises UserError for a short text."""
    tokenizer, found = llm.get_tokenizer(), []
    if tokenizer is None:
        raise UserError(f"{llm.model} has no tokenizer, without which text has no tokens")
    for path in texts:
        ids = tokenizer.encode(path.read_text(), add_special_tokens=False)
        if len(ids) < count * tokens:
            raise UserError(f"{path} has {len(ids)} tokens, less than {count} times {tokens}")
        found += [ids[i * tokens : (i + 1) * tokens] for i in range(count)]
    return found


def decoded(llm: LLM, sequences: Sequence[Sequence[int]], prompt: int) -> Decoded:
    """Decodes sequences of equal length, each behind its first `prompt` tokens."""
    engine = llm.engine
    steps = len(sequences[0]) - prompt
    shape = len(sequences), steps
    nll, likeliest, next_place = np.zeros(shape), np.zeros(shape, np.int64), [0] * len(sequences)
    totals = np.zeros(len(Paging._fields), np.int64)

    def force(step: Step) -> None:
        logits = np.asarray(step.output.logits)
        values, update = np.zeros((2, engine.runner.shapes.rows), np.int32)
        for row, request in step.sampled():
            i = requests[id(request)]
            if (place := next_place[i]) == steps:
                continue  # a row that has ended runs once more
            said, wanted = logits[row].astype(np.float64), sequences[i][prompt + place]
            top = said.max()
            nll[i, place] = top + np.log(np.exp(said - top).sum()) - said[wanted]
            likeliest[i, place] = said.argmax()
            values[row], update[row], next_place[i] = wanted, 1, place + 1
        engine.runner.place_tokens(values, update.astype(bool))
        if step.kind == "decode":
            totals[:] += [int(np.sum(count)) for count in step.output.paging]

    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    asked = [engine.add(list(ids[:prompt]), params) for ids in sequences]
    requests = {id(request): i for i, request in enumerate(asked)}
    engine.listener = force
    try:
        while not engine.idle:
            engine.step()
    finally:
        engine.listener = None
        engine.abort(asked)
    if failed := next((r.finish_reason for r in asked if r.finish_reason != "length"), None):
        raise UserError(f"a sequence ended by {failed!r}; give more memory for KV")
    return Decoded(nll, likeliest, Paging._make(totals.tolist()))


def _row(rows: int, delta: float, found: Decoded, base: Decoded) -> dict[str, Any]:
    active, hits = found.paging.active, found.paging.hits
    return {
        "rows": rows,
        "delta": delta,
        "hit_rate": hits / active,
        "missed_per_token": (active - hits) / found.nll[:, 1:].size,
        "perplexity": float(np.exp(found.nll.mean())),
        "change": float(np.exp(found.nll.mean() - base.nll.mean()) - 1),
        "agreement": float(np.mean(found.likeliest == base.likeliest)),
        "tokens": found.nll.size,
    }
