"""Replays concurrent conversations: long documents, tool-call bursts, changes of topic.

python -m scripts.check sessions [--sessions 8 --turns 6] [--kv-budget 1.5MiB --kv-overflow swap]

Every session begins with a document of its own and goes on turn by turn: the next prompt is all
that was said, the model's answers included, and what the user adds. The engine runs step by step;
turns join when they arrive. A table says what each turn waited for, by its place in the session.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.memory.budget import BudgetError, format_bytes
from moejax import LLM, UserError
from moejax.commands.model import add_model_options, add_options, engine_options
from moejax.evaluate.experiments.conversations.replay import VirtualClock, WallClock, replay
from moejax.evaluate.experiments.conversations.workloads import (
    ARRIVALS,
    Conversation,
    Workload,
    conversations,
    synthetic_corpus,
    text_corpus,
)
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

EPILOG = """\
examples:
  python -m scripts.check sessions
      8 sessions of 6 turns on the embedded model, all memory it wants
  python -m scripts.check sessions --kv-budget 1.5MiB --kv-overflow swap
      KV for about three sessions: the pages of the others go to host memory and back
  python -m scripts.check sessions --kv-budget 1.5MiB --kv-overflow recompute --expert-budget 25%
      the same, dropped and computed again, with a quarter of the experts resident
  python -m scripts.check sessions --memory 4MiB --resize mv_wsa
      the line between experts and KV moves to where a byte is worth most
  python -m scripts.check sessions --arrival bursty --rate 5 --clock wall --json > turns.jsonl
      arrivals in bursts and in real time; a JSON line a turn, the last one is the summary
  python -m scripts.check sessions --text ../shared/corpora/*.txt --shift-share 0.5 --trace run1
      documents cut from files, every second turn changes the topic, and a trace of all steps

time:
  --clock virtual counts a step as --step-ms and jumps over pauses, so which turns meet in a batch
  depends on the seed alone, not on the machine. --clock wall waits. Figures are always measured.

columns:
  turn, turns      place in the session, and how many turns had it
  prompt, cached   tokens of the prompt, and of these, how many had their KV already (means)
  ttft             from a turn's arrival in the engine to its first token
  tpot             from one token to the next, mean
  preempted        how often a turn was moved out while it ran
"""

WORKLOAD_OPTIONS = {
    "sessions": "conversations",
    "turns": "of a session",
    "rate": "sessions that arrive a second, in the mean",
    "system_tokens": "that all sessions begin with",
    "document_tokens": "of a session's own document",
    "question_tokens": "that a turn adds, about",
    "answer_tokens": "that a turn generates, about",
    "think_s": "seconds between turns, in the mean",
    "tool_share": "of turns that begin a burst of tool calls",
    "tool_turns": "of a burst",
    "shift_share": "of turns that change the topic and bring a document of it",
    "shift_tokens": "of that document",
    "seed": "of everything random",
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        names = [field.name for field in dataclasses.fields(Workload) if hasattr(args, field.name)]
        workload = Workload(**{name: getattr(args, name) for name in names})
        if args.step_ms <= 0:
            raise UserError(f"--step-ms must be above 0, got {args.step_ms}")
        with LLM(args.model, progress=False, **engine_options(args)) as llm:
            found = make_conversations(llm, workload, args.text)
            clock = WallClock() if args.clock == "wall" else VirtualClock(args.step_ms / 1e3)
            began = time.perf_counter()
            lines = list(
                replay(llm.engine, found, clock, temperature=args.temperature, seed=args.seed)
            )
            summary = summarise(llm, lines, time.perf_counter() - began, clock.now())
    except (UserError, BudgetError) as error:
        return refuse(__name__, error)
    if args.json:
        for line in (*lines, {"summary": summary}):
            print(json.dumps(line))
    else:
        print("\n".join(report(lines, summary)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__, EPILOG)
    group = parser.add_argument_group("workload")
    for field in dataclasses.fields(Workload):
        if field.name in WORKLOAD_OPTIONS:
            group.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default),
                default=field.default,
                metavar="N",
                help=f"{WORKLOAD_OPTIONS[field.name]} (default: %(default)s)",
            )
    group.add_argument(
        "--arrival", choices=ARRIVALS, default="poisson", help="of sessions (default: %(default)s)"
    )
    group.add_argument(
        "--text", nargs="+", metavar="FILE", help="a topic per file (default: random tokens)"
    )
    group.add_argument("--clock", choices=("virtual", "wall"), default="virtual")
    group.add_argument(
        "--step-ms", type=float, default=10.0, help="of the virtual clock (default: %(default)s)"
    )
    group.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--model", default="demo", help="as for moejax generate (default: demo)")
    add_model_options(parser)
    add_options(parser, "trace")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout, no table")
    return parser


def make_conversations(
    llm: LLM, workload: Workload, text: Sequence[str] | None
) -> tuple[Conversation, ...]:
    """The workload's conversations in the model's tokens. Raises UserError where one would be
    longer than max_model_len."""
    if text:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise UserError(f"{llm.model} has no tokenizer; leave out --text")
        corpus = text_corpus(text, lambda string: tokenizer(string)["input_ids"])
    else:
        corpus = synthetic_corpus(llm.config.vocab_size, workload.seed)
    found = conversations(workload, corpus)
    longest, limit = max(each.tokens for each in found), llm.engine.scheduler.max_model_len
    if longest > limit:
        raise UserError(
            f"the longest conversation comes to {longest} tokens, max_model_len is {limit}; lower "
            "--document-tokens, --turns, --question-tokens or --answer-tokens"
        )
    return found


# ---- the report


def summarise(
    llm: LLM, lines: Sequence[dict[str, Any]], wall_s: float, clock_s: float
) -> dict[str, Any]:
    """Totals of the run: measured seconds, tokens, and what llm.stats() counted."""
    stats = llm.stats()
    generated = sum(line["output_tokens"] for line in lines)
    return {
        "turns": len(lines),
        "wall_s": wall_s,
        "clock_s": clock_s,
        "generated_tokens": generated,
        "tokens_per_s": generated / wall_s,
        "prompt_tokens": sum(line["prompt_tokens"] for line in lines),
        "cached_tokens": sum(line["cached_tokens"] for line in lines),
        "kv": stats["kv"],
        "experts": stats["experts"],
        "budget": stats["budget"],
        "steps": stats["steps"],
    }


def report(lines: Sequence[dict[str, Any]], summary: dict[str, Any]) -> Iterator[str]:
    """The table by turn and the totals below it."""
    rows = []
    for index in sorted({line["turn"] for line in lines}):
        chosen = [line for line in lines if line["turn"] == index]
        first = [line["ttft_s"] * 1e3 for line in chosen]
        tpot = [line["tpot_s"] * 1e3 for line in chosen if line["tpot_s"] is not None]
        rows.append(
            {
                "turn": index,
                "turns": len(chosen),
                "prompt": np.mean([line["prompt_tokens"] for line in chosen]),
                "cached": np.mean([line["cached_tokens"] for line in chosen]),
                "p50": np.median(first),
                "max": max(first),
                "tpot": f"{np.mean(tpot):.2f}" if tpot else "-",
                "preempted": sum(line["preemptions"] for line in chosen),
            }
        )
    yield from aligned(
        [
            ("turn", "{turn}"),
            ("turns", "{turns}"),
            ("prompt", "{prompt:.0f}"),
            ("cached", "{cached:.0f}"),
            ("ttft p50 ms", "{p50:.1f}"),
            ("ttft max ms", "{max:.1f}"),
            ("tpot ms", "{tpot}"),
            ("preempted", "{preempted}"),
        ],
        rows,
    )
    kv, experts = summary["kv"], summary["experts"]
    share = summary["cached_tokens"] / summary["prompt_tokens"]
    yield (
        f"{summary['generated_tokens']} tokens in {summary['wall_s']:.1f} s, "
        f"{summary['tokens_per_s']:.0f} tokens/s"
    )
    yield (
        f"KV: {summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens were there "
        f"({share:.0%}), {format_bytes(kv['swapped_out_bytes'])} swapped out, "
        f"{format_bytes(kv['swapped_in_bytes'])} swapped in, {kv['preemptions']} preemptions, "
        f"{kv['sessions_evicted']} sessions evicted"
    )
    yield f"experts: hit rate {experts['hit_rate']:.1%} of {experts['activations']} activations"
    if (budget := summary["budget"])["resizes"]:
        yield f"budget: resizes {budget['resizes']}, slots moved {budget['slots_moved']}"
