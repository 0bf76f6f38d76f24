"""``moejax generate``: text from a prompt, or from every line of a file.

Nothing heavy is imported before the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from typing import TYPE_CHECKING, Any

from moejax.commands.generate_file import add_file_options, check_file_options, generate_file
from moejax.commands.options.engine import (
    add_model_options,
    add_options,
    engine_options,
    notes_unsaid,
)
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moejax.serve.llm import LLM

MAX_TOKENS = 128
"""Default of the command; `SamplingParams` has vLLM's 16, which is short for reading."""

_SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
_EPILOG = """\
examples:
  moejax generate "The old house"
      the embedded demo model, everything resident
  moejax generate "The old house" --expert-budget 25% --temperature 0
      a quarter of the experts in the arena, the rest fetched when needed; the same text
  moejax generate "def main():" --model /models/Qwen3-30B-A3B --memory 16GiB
      a Hugging Face directory in 16 GiB of arena
  moejax generate - < prompt.txt > out.txt
      the prompt from standard input; only generated text goes to standard output
  moejax generate --input prompts.jsonl --output out.jsonl --temperature 0
      a result for every line {"id": …, "prompt": …}; the same command again goes on after an end
      of any kind. OpenAI batch lines work too; docs/batch.md has all fields

files:
  Sampling options are those of lines that do not say otherwise. --seed is the job's: a line
  without a seed gets one that comes from it and from the line's id, so neither order nor
  interruption changes a result.

memory:
  The arena is one fixed piece of device memory that holds experts and KV. --memory is its size,
  --expert-budget and --kv-budget are its parts; two of the three fix the third. Without any,
  everything is resident, cut to what fits. Less memory makes a run slower, never different.
  Sizes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000.

exit status:
  0 done, 2 a mistake that the message explains, also a bad line, 3 a file is done but some of its
  results are errors (--on-error skip), 130 interrupted (Ctrl-C), 141 stdout was closed
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command; its `run` takes the parsed arguments and returns the exit status."""
    generate = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generate text from a prompt. The text goes to stdout as it is made, without "
        "the prompt;\nprogress and a summary go to stderr. Or, with --input, from every line of a "
        "file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    generate.set_defaults(run=_run, refuse=generate.error)
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads stdin"
    )
    generate.add_argument(
        "--model",
        default="demo",
        metavar="PATH",
        help="a Hugging Face or Orbax directory, or demo, the embedded model (default: demo)",
    )
    add_file_options(generate.add_argument_group("files"))
    _add_sampling(generate.add_argument_group("sampling"))
    add_model_options(generate)
    output = generate.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="no progress, and the statistics as one JSON object on stderr, not the summary",
    )
    output.add_argument("--quiet", action="store_true", help="no progress and no summary")
    add_options(output, "trace")


def _run(args: argparse.Namespace) -> int:
    check_file_options(args)
    return _generate_text(args) if args.input is None else _generate_file(args)


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING_OPTIONS})


def _generate_text(args: argparse.Namespace) -> int:
    params, options = _sampling(args), engine_options(args)
    prompt = _read_prompt(args.prompt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that cannot show a character must not end the run.
        sys.stdout.reconfigure(errors="replace")

    from moejax import LLM

    progress = not (args.quiet or args.json)
    with notes_unsaid(), LLM(args.model, progress=progress, **options) as llm:
        if llm.get_tokenizer() is None:
            raise UserError(
                f"{args.model} has no tokenizer, which the command line needs; add its "
                f"tokenizer.json, or pass token ids to moejax.LLM.generate in Python"
            )
        _stream(llm, prompt, params)
        stats = llm.stats()
    _print_stats(args, stats)
    return 0


def _generate_file(args: argparse.Namespace) -> int:
    params, options = _sampling(args), engine_options(args)

    def start() -> LLM:
        from moejax import LLM

        return LLM(args.model, progress=not (args.quiet or args.json), **options)

    with notes_unsaid():
        status, stats = generate_file(args, params, start)
    if stats is not None:
        _print_stats(args, stats)
    return status


def _print_stats(args: argparse.Namespace, stats: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(stats), file=sys.stderr)
    elif not args.quiet:
        from moejax.serve.summary import format_summary

        print("\n" + format_summary(stats), file=sys.stderr)


def _stream(llm: Any, prompt: str, params: SamplingParams) -> None:
    """Write the text as it comes, and a newline at the end also when it ends early."""
    last = ""
    try:
        for piece in llm.stream(prompt, params):
            if piece:
                sys.stdout.write(piece)
                sys.stdout.flush()
                last = piece
    except BaseException:
        if last and not last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _read_prompt(prompt: str) -> str:
    try:
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        prompt.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8 text ({error})") from None
    return prompt


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    default = SamplingParams()
    group.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"most tokens to generate (default: {MAX_TOKENS})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=default.temperature,
        metavar="T",
        help=f"randomness, 0 to 2; 0 always takes the likeliest token "
        f"(default: {default.temperature}, as in vLLM)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=default.top_k,
        metavar="K",
        help="draw from the K likeliest tokens (default: 0, all)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=default.top_p,
        metavar="P",
        help="draw from the likeliest tokens with probability P together (default: 1.0, all)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=default.min_p,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest (default: 0.0, all)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the draws; another seed, another text (default: one that never changes)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-sequence token"
    )
