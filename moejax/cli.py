"""The command ``moejax``.

Nothing heavy is imported before the arguments are known to be right, so ``--help`` and mistakes
answer at once.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from host_offload.budget import BudgetError
from moejax.errors import UserError
from moejax.file_command import (
    EXIT_INTERRUPTED,
    add_file_options,
    check_file_options,
    generate_file,
)
from moejax.sampling_params import SamplingParams
from moejax.sizes import parse_expert_budget, parse_size

if TYPE_CHECKING:
    from moejax.llm import LLM

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of stdout went away, as with ``| head``."""

MAX_TOKENS = 128
"""Of one command; `SamplingParams` has vLLM's 16, which is short for reading."""

_SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
_ENGINE_OPTIONS = (
    "memory",
    "expert_budget",
    "kv_budget",
    "dtype",
    "device",
    "ops",
    "driver",
    "eviction",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "swap_space",
    "kv_overflow",
    "enable_prefix_caching",
    "trace",
)

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. argv: the arguments after ``moejax``."""
    try:
        args = _parser().parse_args(argv)
        check_file_options(args)
        return _generate(args) if args.input is None else _generate_file(args)
    except (UserError, BudgetError) as error:
        print(f"moejax: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("moejax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING_OPTIONS})


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    for name, parse in (
        ("memory", parse_size),
        ("expert_budget", parse_expert_budget),
        ("kv_budget", parse_size),
    ):
        if getattr(args, name) is not None:
            parse(getattr(args, name))
    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    # What was not given keeps the library's default.
    return {name: value for name, value in options.items() if value is not None}


def _generate(args: argparse.Namespace) -> int:
    params, options = _sampling(args), _engine_options(args)
    prompt = _read_prompt(args.prompt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that cannot show a character must not end the run.
        sys.stdout.reconfigure(errors="replace")

    from moejax import LLM

    progress = not (args.quiet or args.json)
    with _notes_unsaid(), LLM(args.model, progress=progress, **options) as llm:
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
    params, options = _sampling(args), _engine_options(args)

    def start() -> LLM:
        from moejax import LLM

        return LLM(args.model, progress=not (args.quiet or args.json), **options)

    with _notes_unsaid():
        status, stats = generate_file(args, params, start)
    if stats is not None:
        _print_stats(args, stats)
    return status


def _print_stats(args: argparse.Namespace, stats: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(stats), file=sys.stderr)
    elif not args.quiet:
        from moejax.summary import format_summary

        print("\n" + format_summary(stats), file=sys.stderr)


@contextmanager
def _notes_unsaid() -> Iterator[None]:
    """The summary has every note; a warning would only say it twice."""
    log = logging.getLogger("moejax")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


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


class _Version(argparse.Action):
    """``--version``, looked up only when asked for."""

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"moejax {version('moejax')}")
        except PackageNotFoundError:
            raise UserError("moejax runs from its source and has no version; install it") from None
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moejax",
        description="Run Mixture-of-Experts language models that do not fit in device memory.",
        epilog="moejax generate --help has the options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
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
    generate.set_defaults(refuse=generate.error)
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads stdin"
    )
    generate.add_argument(
        "--model",
        default="demo",
        metavar="PATH",
        help="a Hugging Face model directory, or demo, the embedded one (default: demo)",
    )
    add_file_options(generate.add_argument_group("files"))
    _add_sampling(generate.add_argument_group("sampling"))
    _add_memory(generate.add_argument_group("memory"))
    _add_engine(generate.add_argument_group("engine"))
    output = generate.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="no progress, and the statistics as one JSON object on stderr, not the summary",
    )
    output.add_argument("--quiet", action="store_true", help="no progress and no summary")
    output.add_argument(
        "--trace",
        metavar="DIR",
        help="write what each step routed, missed and moved into this new directory, for "
        "moejax.traces.read_trace",
    )
    return parser


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


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--memory", metavar="SIZE", help="bytes of the arena, such as 16GiB")
    group.add_argument(
        "--expert-budget",
        metavar="SIZE|SHARE",
        help="what experts get: bytes such as 6GiB, or a share of them such as 25%%; 0 is legal",
    )
    group.add_argument("--kv-budget", metavar="SIZE", help="bytes that KV gets, such as 2GiB")
    group.add_argument(
        "--swap-space", metavar="SIZE", help="host memory for KV that makes room (default: 4GiB)"
    )
    group.add_argument(
        "--kv-overflow",
        choices=("swap", "recompute"),
        help="KV that makes room is swapped to host memory, or dropped and computed again, which "
        "changes bits (default: swap)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="prompts with equal beginnings share KV (default: they do)",
    )
    group.add_argument(
        "--eviction",
        choices=("lru", "lfu", "lfru", "fifo", "static"),
        help="which expert makes room: the least recently used, the least frequently used, the "
        "smallest frequency over age, the one that came first, or none of a hot set (default: lru)",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype", metavar="DTYPE", help="bfloat16, float16, float32, auto (default: auto)"
    )
    group.add_argument(
        "--device", choices=("cpu", "gpu"), help="where to run (default: a GPU if there is one)"
    )
    group.add_argument(
        "--ops",
        metavar="OPS",
        help="implementation of the ops: auto (Pallas kernels on a GPU, else XLA), xla, pallas, or "
        "pairs such as plan=xla,route=pallas (default: auto)",
    )
    group.add_argument(
        "--driver",
        choices=("device", "host"),
        help="who walks through the layers: device runs a step as one executable, host calls them "
        "from Python, slower, for policies that look in between (default: device)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of prompt and text together (default: the model's)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences that run at once (default: 16 on CPU, 64 on GPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="most prompt tokens in one sweep over the model",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="most tokens of one prompt in a sweep that others wait for (default: a quarter of it)",
    )
