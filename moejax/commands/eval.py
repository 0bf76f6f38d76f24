"""``moejax eval``: how likely a model finds texts.

Nothing heavy is imported before the files are known to be right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import EXIT_INTERRUPTED, add_command
from moejax.commands.model import (
    add_described,
    add_model,
    add_model_options,
    add_options,
    asked,
    engine_options,
    started,
)
from moejax.errors import UserError
from moejax.interrupt import ending_after_interrupt
from moejax.start.options import Description

if TYPE_CHECKING:
    from moejax.evaluate.evaluation import Cost, Likelihood, PerplexityResult

_WINDOWS = {
    "window": Description(
        "tokens that are computed together (default: 2048, at most --max-model-len)", type=int
    ),
    "stride": Description(
        "tokens from one window's beginning to the next one's (default: half a window)", type=int
    ),
    "limit": Description("only the first N tokens of each file", type=int),
}
_EPILOG = """\
examples:
  moejax eval demo --task perplexity --data book.txt code.txt
      a line for each file, and one for all together
  moejax eval /models/Qwen3-30B-A3B --task perplexity --data wiki.txt --memory 16GiB --json
      the same numbers to the last bit as with all experts resident, and what the run cost
  moejax eval demo --task perplexity --data book.txt --window 512 --stride 512 --limit 20000
      windows that do not overlap, over the first 20000 tokens

windows:
  As in transformers' "Perplexity of fixed-length models": windows begin every --stride tokens, and
  each scores what the one before did not reach, so every token but a file's first is scored once.
  With --stride equal to --window nothing overlaps, and the first token of each window, which has no
  context, is not scored. docs/evaluation.md has the fields of --json.

exit status:
  0 done, 2 a mistake that the message explains, 130 interrupted (Ctrl-C), 141 stdout was closed
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    evaluate = add_command(
        commands,
        "eval",
        _run,
        "measure a model's perplexity on text files",
        _EPILOG,
        "Measure how likely a model finds text files. Results go to stdout, progress and what\n"
        "the run cost to stderr.",
    )
    add_model(evaluate)
    task = evaluate.add_argument_group("task")
    task.add_argument("--task", choices=("perplexity",), required=True, help="what to measure")
    task.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help="text files in UTF-8"
    )
    add_described(task, _WINDOWS)
    add_model_options(evaluate)
    output = evaluate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, and no progress")
    output.add_argument("--quiet", action="store_true", help="results only")
    add_options(output, "trace")


def _run(args: argparse.Namespace) -> int:
    # Also while modules are imported: jax's callback of the garbage collector may swallow Ctrl-C.
    with ending_after_interrupt(1.5, EXIT_INTERRUPTED):
        return _evaluate(args)


def _evaluate(args: argparse.Namespace) -> int:
    options, windows = engine_options(args), asked(args, _WINDOWS)
    texts = {}
    for name in args.data:
        if name in texts:
            raise UserError(f"{name} is named twice in --data; each file is scored once")
        texts[name] = _read_text(name)

    from moejax.evaluate.evaluation import check_windows, perplexity, result_json

    check_windows(**windows)
    with started(args, options) as llm:
        result = perplexity(llm, texts, **windows, progress=not (args.quiet or args.json))
        report = result_json(llm, result)
    report["run"]["options"] = options
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    print(_format_result(result))
    if not args.quiet:
        print("\n" + _format_cost(result.cost, report["run"]), file=sys.stderr)
    return 0


def _read_text(name: str) -> str:
    """A file's text with its line ends as they are. Raises UserError for one that is empty, cannot
    be read or is not UTF-8."""
    try:
        text = Path(name).read_bytes().decode()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}; "
            f"convert it first, as with iconv -t UTF-8"
        ) from None
    if not text:
        raise UserError(f"{name} is empty; there is nothing to score")
    return text


def _format_result(result: PerplexityResult) -> str:
    rows: list[tuple[str, Likelihood]] = [(text.name, text) for text in result.texts]
    if len(rows) > 1:
        rows.append(("all", result.total))
    cells = [("", "tokens", "scored", "bits/token", "bits/byte", "perplexity")]
    for name, found in rows:
        bits = f"{found.bits_per_token:.4f}", f"{found.bits_per_byte:.4f}"
        counts = f"{found.tokens:,}", f"{found.scored_tokens:,}"
        cells.append((name, *counts, *bits, f"{found.perplexity:.4f}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in cells
    )


def _format_cost(cost: Cost, run: Mapping[str, Any]) -> str:
    hit_rate = "–" if run["hit_rate"] is None else f"{run['hit_rate']:.1%}"
    lines = [
        f"speed    {cost.computed_tokens} tokens computed in {cost.seconds:.2f} s, of which "
        f"{cost.compile_s:.2f} s compiled; {cost.tokens_per_s:.0f} tokens/s",
        f"experts  hit rate {hit_rate} of {cost.activations} activations ({cost.fills} fills, "
        f"{cost.read_through} read through), {run['eviction']}",
        f"moved    {format_bytes(cost.fill_bytes)} filled, "
        f"{format_bytes(cost.read_through_bytes)} read through in "
        f"{cost.prefill_steps} prefill steps",
    ]
    return "\n".join(lines + [f"note     {note}" for note in run["notes"]])
