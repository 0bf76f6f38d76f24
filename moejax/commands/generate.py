"""``moejax generate`` generates text from a prompt, or from every line of a file."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import EXIT_BAD_LINES, EXIT_INTERRUPTED, add_command, put_aside, say
from moejax.commands.model import (
    CLUSTER,
    add_described,
    add_model_option,
    add_model_options,
    connect_cluster,
    engine_options,
    pick_arguments,
    start_llm,
    wants_cluster,
)
from moejax.errors import UserError, shown
from moejax.requests.sampling_params import SamplingParams
from moejax.start.fields import Description, of_fields
from moejax.start.options import refuse_unequal
from pallas_kernels.option_text import unknown

if TYPE_CHECKING:
    from moejax.requests.request import Prompt
    from moejax.serve.batch.job import OpenJob

MAX_TOKENS = 128
"""Default of the command. `SamplingParams` has vLLM's 16, which is too short to read."""

SAMPLING = of_fields(
    SamplingParams,
    {
        "max_tokens": Description(f"most tokens to generate (default: {MAX_TOKENS})"),
        "temperature": Description(
            "randomness, 0 to 2; 0 always takes the likeliest token (default: the model's, else 1)",
            metavar="T",
        ),
        "top_k": Description(
            "draw from the K likeliest tokens (default: the model's, else all)", metavar="K"
        ),
        "top_p": Description(
            "draw from the likeliest tokens with probability P together (default: the model's, "
            "else all)",
            metavar="P",
        ),
        "min_p": Description(
            "draw from tokens at least P times as likely as the likeliest (default: the model's, "
            "else all)",
            metavar="P",
        ),
        "seed": Description(
            "seed of the random draws (default: a fixed one; the same command gives the same text)"
        ),
        "presence_penalty": Description("lowers tokens that occurred, -2 to 2", metavar="P"),
        "frequency_penalty": Description("the same by how often they occurred", metavar="P"),
        "repetition_penalty": Description(
            "divides logits of tokens that occurred, also in the prompt; above 1 lowers them",
            metavar="P",
        ),
        "min_tokens": Description("tokens before which nothing ends the text"),
        "ignore_eos": Description("go on after the end-of-sequence token", default=False),
    },
)
"""Options of `generate` and `chat`."""

_OUTPUTS = of_fields(
    SamplingParams,
    {
        "n": Description("how many texts to generate of the prompt (default: 1)"),
        "logprobs": Description(
            "after the text, a line for each token with its log-probability and those of the N "
            "likeliest tokens"
        ),
    },
)

_FILES = {
    "output": Description(
        "file of results, JSON lines, appended as they finish; existing results are kept and not "
        "computed again; - writes to stdout",
        metavar="FILE",
    ),
    "on_error": Description(
        "a bad line ends the job (fail), or its result is an error (skip) (default: fail)",
        choices=("fail", "skip"),
    ),
    "overwrite": Description(
        "delete the results in --output and start again", type=bool, default=False
    ),
}
_EPILOG = """\
examples:
  moejax generate "The old house" --expert-budget 25% --temperature 0
      the embedded demo model, a quarter of its experts in the arena; the same text as with all
  moejax generate "def main():" --model /models/Qwen3-30B-A3B --memory 16GiB
      a Hugging Face directory in 16 GiB of arena
  moejax generate "What is 3 times 14?" --chat --system "Answer in one sentence."
      the prompt as a message, in the model's chat template
  moejax generate --input prompts.jsonl --output out.jsonl
      a result for every line {"id": …, "prompt": …}; the same command continues after a kill
"""

_MORE = """\
  moejax generate - < prompt.txt > out.txt
      the prompt from standard input; only generated text goes to standard output
  moejax generate --input prompts.jsonl --output out.jsonl --ray local --workers 2
      the job on two workers; HOST:PORT of a Ray cluster's head uses all its GPUs
      (docs/how-to/ray.md)
  moejax generate "The old house" --expert-budget 25% --timeline run.json
      what every op did when, for https://ui.perfetto.dev

files:
  Sampling options are defaults; a line may have its own. A line without a seed gets one from --seed
  and its id, so neither order nor interruption changes a result. OpenAI batch lines work too;
  docs/reference/file_jobs.md has all fields.

memory:
  The arena is one fixed buffer on the device that holds experts and KV. --memory is its size,
  --expert-budget and --kv-budget are its parts; two of the three fix the third. Without any,
  everything is resident, cut to what fits. Less memory makes a run slower and changes no token.
  Sizes: K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000.

exit status:
  0 done; 2 a mistake that the message explains, or a bad line; 3 a file is done and some results
  are errors (--on-error skip); 130 interrupted (Ctrl-C); 141 stdout was closed
"""

_RARE = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    "logprobs",
)
"""Sampling options that --help leaves out."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    generate = add_command(
        commands,
        "generate",
        _run,
        "generate text from a prompt",
        _EPILOG,
        "Generate text from a prompt or, with --input, from every line of a file. Only generated\n"
        "text goes to stdout; progress and a summary go to stderr.",
        more=_MORE,
    )
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads stdin"
    )
    generate.add_argument(
        "--chat", action="store_true", help="PROMPT is a message: apply the model's chat template"
    )
    generate.add_argument("--system", metavar="TEXT", help="with --chat, the system's message")
    add_template_values(generate, "with --chat, ")
    add_model_option(generate)
    files = generate.add_argument_group("files")
    files.add_argument(
        "--input",
        metavar="FILE",
        help="file of JSON lines with a prompt each, instead of PROMPT; - reads stdin",
    )
    add_described(files, _FILES)
    put_aside(add_described(generate.add_argument_group("several machines"), CLUSTER))
    add_sampling(generate, SAMPLING | _OUTPUTS)
    add_model_options(generate)
    output = generate.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="no progress; the statistics as one JSON object on stderr instead of the summary",
    )
    output.add_argument("--quiet", action="store_true", help="no progress and no summary")
    output.add_argument("--verbose", action="store_true", help="a summary of several lines")
    output.add_argument(
        "--timeline",
        metavar="FILE",
        help="write when native CPU ops and the transfer queue did what, FILE.json for "
        "https://ui.perfetto.dev; only for a prompt, not for --input",
    )
    output.add_argument(
        "--picture",
        metavar="FILE",
        help="draw what memory holds at the end and which experts were chosen, FILE.svg or "
        "FILE.png; only for a prompt, not for --input",
    )


def _run(args: argparse.Namespace) -> int:
    text, files = args.prompt is not None, args.input is not None
    jobs = args.output or args.on_error or args.overwrite
    wrong = {
        "the following arguments are required: PROMPT (or --input FILE)": not text and not files,
        "PROMPT and --input exclude each other": text and files,
        "--input needs --output FILE, or --output - for standard output": files
        and args.output is None,
        "--output, --on-error and --overwrite need --input": jobs and not files,
        "--timeline goes with a PROMPT, not with --input": args.timeline is not None and files,
        "--picture goes with a PROMPT, not with --input": args.picture is not None and files,
        "--chat goes with a PROMPT; a line of --input may have messages": args.chat and files,
        "--system needs --chat": args.system is not None and not args.chat,
        "--chat-template-kwargs needs --chat": args.chat_template_kwargs is not None
        and not args.chat,
        "--ray needs --input FILE": wants_cluster(args) and not files,
    }
    for message, applies in wrong.items():
        if applies:
            args.parser.error(message)
    given, options = given_sampling(args), engine_options(args)
    return (_generate_file if files else _generate_text)(args, given, options)


def add_sampling(parser: argparse.ArgumentParser, described: Mapping[str, Description]) -> None:
    """Adds options for fields of SamplingParams: the described ones, --stop, and --sampling for all
    others."""
    group = parser.add_argument_group("sampling")
    actions = add_described(group, described)
    put_aside(action for action in actions if action.dest in _RARE)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; give it several times for several texts",
    )
    group.add_argument(
        "--sampling",
        metavar="JSON",
        help="other fields of SamplingParams (docs/reference/sampling.md), such as "
        '\'{"bad_words": ["cat"]}\'',
    )
    parser.set_defaults(sampling_fields=[*described, "stop"])


def add_template_values(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Adds --chat-template-kwargs.

    - `when`: begins its help.
    """
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help=f"{when}values of names in the chat template, such as "
        "'{\"enable_thinking\": false}'",
    )


def template_values(args: argparse.Namespace) -> dict[str, Any]:
    """Reads --chat-template-kwargs. Raises UserError for what is no JSON object."""
    given = args.chat_template_kwargs
    return {} if given is None else json_mapping(given, "--chat-template-kwargs")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the command line gives. Raises UserError for a value out of
    range."""
    given: dict[str, Any] = {}
    if args.sampling is not None:
        given = json_mapping(args.sampling, "--sampling")
        known = [field.name for field in dataclasses.fields(SamplingParams) if field.init]
        for name in given:
            if name not in known:
                raise UserError(f"--sampling: {unknown('field', name, known)}")
    picked = pick_arguments(args, args.sampling_fields)
    given |= {name: value for name, value in picked.items() if value is not None}
    SamplingParams(**given)
    return given


def json_mapping(text: str, where: str) -> dict[str, Any]:
    """Reads a JSON object of an option. Raises UserError for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is a JSON object, not {shown(found)}")
    return found


def _generate_text(args: argparse.Namespace, given: dict[str, Any], options: dict) -> int:
    from moejax.requests.first_check import check_first, require_tokenizer

    if args.picture is not None:
        from moejax.serve.picture import check_picture

        check_picture(args.picture)
    prompt: Prompt = _read_prompt(args.prompt)
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = {"messages": [*system, {"role": "user", "content": prompt}]}
        prompt["chat_template_kwargs"] = template_values(args)
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, **given})
    context, tokenizer = options.get("max_model_len"), options.get("tokenizer")
    prompt = check_first(args.model, prompt, params, context, tokenizer)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that cannot show a character must not end the run.
        sys.stdout.reconfigure(errors="replace")
    with start_llm(args, options) as llm:
        require_tokenizer(llm.engine.tokenizer, args.model)
        usual = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        params = dataclasses.replace(usual, **given)
        with _timeline(args.timeline, llm), _picture(args.picture, llm):
            streams = params.n == 1 and params.logprobs is None
            (write_stream if streams else write_outputs)(llm, prompt, params)
        stats = llm.stats()
    if args.json or not args.quiet:
        print(json.dumps(stats) if args.json else f"\n{_summary(args, stats)}", file=sys.stderr)
    return 0


def _summary(args: argparse.Namespace, stats: Mapping[str, Any]) -> str:
    return format_summary(stats) if args.verbose else format_line(stats)


@contextmanager
def _picture(path: str | None, llm: Any) -> Iterator[None]:
    """Counts routing in the block, and draws the engine at its end. Without a path, it does
    nothing."""
    if path is None:
        yield
        return
    from moejax.engine.snapshot import RoutingCounts, describe, snapshot
    from moejax.serve.picture import write_picture

    engine = llm.engine
    counts = RoutingCounts(engine)
    engine.listener = counts.listen
    yield
    write_picture(path, describe(engine), snapshot(engine, counts), llm.model)


@contextmanager
def _timeline(path: str | None, llm: Any) -> Iterator[None]:
    """Records the block and writes its timeline to a file. Without a path, it does nothing. Raises
    UserError where ops do not run natively."""
    if path is None:
        yield
        return
    from moejax.traces.timeline import check_timeline, measured_events, write_timeline
    from pallas_kernels.cpu.spans import recorded

    check_timeline(path)
    if not llm.plan.steps.owned:
        raise UserError(
            "--timeline records native CPU ops, and here some ops are others (`moejax plan "
            "--dry-run` says which); `python -m pallas_kernels.cpu` builds them; moejax plan "
            "--timeline draws what is predicted"
        )
    queue = llm.engine.runner.transport.queue
    if queue is not None:
        queue.record()
    with recorded() as ops:
        yield
    write_timeline(path, measured_events(ops, () if queue is None else queue.spans()))


def _generate_file(args: argparse.Namespace, given: dict[str, Any], options: dict) -> int:
    """Runs the job of --input.

    - `given`: fields of SamplingParams for lines without their own; its seed is the job's.
    """
    from moejax.models.hub import model_directory
    from moejax.requests.generation_config import sampling_defaults
    from moejax.serve.batch.job import Job, list_given_fields, open_job
    from moejax.start.provenance import decided_by

    if args.kv_overflow == "recompute":
        raise UserError(
            "--kv-overflow recompute makes results depend on what else runs, so a job could not be "
            "resumed to the same ones; use swap, with more --swap-space if it is too small"
        )
    why = "a job could not be resumed to the same results"
    refuse_unequal(options, why)
    choice = options.get("generation_config", "auto")
    usual = {"max_tokens": MAX_TOKENS, **sampling_defaults(model_directory(args.model), choice)}
    params = SamplingParams(**{**usual, **given})
    job = Job(
        input=args.input,
        output=args.output,
        model=args.model,
        dtype=args.dtype or "auto",
        decided_by=decided_by(args.model, options),
        sampling=list_given_fields(params),
        seed=params.seed or 0,
        on_error=args.on_error or "fail",
        overwrite=args.overwrite,
    )
    if args.ray is not None and args.trace is not None:
        raise UserError("--trace is of one model, not of many; leave out --trace or --ray")
    run = _on_one if args.ray is None else _on_cluster
    with open_job(job) as work:
        before, summary = work.done, ""
        try:
            # A finished or empty job needs no model, which would take long to load.
            if work.complete:
                work.results.begin(overwrite=work.job.overwrite)
            else:
                summary = run(args, options, work)
        except KeyboardInterrupt:
            if args.output == "-":
                raise
            of = "" if work.total is None else f" of {work.total}"
            say(
                f"interrupted; {work.done}{of} results are in {args.output}, and the same command "
                f"goes on from there"
            )
            return EXIT_INTERRUPTED
    if not work.done:
        from moejax.serve.batch.lines import EXAMPLE

        say(f"{args.input} has no lines, so there is nothing to do; one is like {EXAMPLE}")
    elif work.errors or not args.quiet:
        kept = f", {before} of them from before" if before else ""
        say(f"{work.done} results{kept}, {work.errors} errors")
    if summary and (args.json or not args.quiet):
        print(summary if args.json else f"\n{summary}", file=sys.stderr)
    return EXIT_BAD_LINES if work.errors else 0


def _on_one(args: argparse.Namespace, options: dict, work: OpenJob) -> str:
    """Runs the job in this process. Returns its statistics as text for stderr."""
    # No bar where result lines go to the same terminal, since the two would mix.
    bar = not (args.quiet or args.json or (args.output == "-" and sys.stdout.isatty()))
    # Kernels that were checked since the job began would give other bits.
    before = dict(work.chosen_before())
    before.pop("weights", None)  # of workers; no option
    with start_llm(args, {**before, **options}) as llm:
        work.chosen.update(llm.chosen)
        work.run(llm, progress=bar, warn=say)
        stats = llm.stats()
    return json.dumps(stats) if args.json else _summary(args, stats)


def _on_cluster(args: argparse.Namespace, options: dict, work: OpenJob) -> str:
    """Runs the job on Ray's workers. Returns its statistics as text for stderr."""
    from moejax.serve.cluster.fleet import Fleet, format_fleet

    before = dict(work.chosen_before())
    if (weights := before.pop("weights", None)) is not None:
        work.chosen["weights"] = weights
    with (
        connect_cluster(args) as scale,
        Fleet(args.model, {**before, **options}, scale, work.turns, say, work.chosen) as fleet,
    ):
        work.run(fleet, progress=not (args.quiet or args.json), warn=say)
        stats = fleet.stats()
    return json.dumps(stats) if args.json else format_fleet(stats)


def format_line(stats: Mapping[str, Any]) -> str:
    """A line that sums up `LLM.stats`."""
    experts, moved = stats["experts"], sum(stats["bytes"].values())
    delta = stats["cache_aware_routing"]
    other = "" if delta is None else f"cache_aware_routing {delta} CHANGES OUTPUTS; "
    return other + (
        f"{stats['prompt_tokens']} + {stats['generated_tokens']} tokens; first after "
        f"{_ms(stats['ttft_s']['mean'])}, then {_ms(stats['tpot_s']['mean'])} each; hit rate "
        f"{_number(experts['hit_rate'], '.1%')}, {format_bytes(moved)} moved (--verbose says more)"
    )


def format_summary(stats: Mapping[str, Any]) -> str:
    """A summary of `LLM.stats` in lines of text; --json has all of it. A time or rate that does not
    exist yet, because no token or expert was computed, is None in stats and a dash here."""
    experts, arena, moved = stats["experts"], stats["arena"], sum(stats["bytes"].values())
    ttft, tpot, size = stats["ttft_s"], stats["tpot_s"], format_bytes
    lines = {
        "tokens": f"{stats['prompt_tokens']} prompt, {stats['generated_tokens']} generated, "
        f"{_number(stats['tokens_per_s'], '.1f')} tokens/s; first token {_ms(ttft['mean'])}, then "
        f"per token mean {_ms(tpot['mean'])}, p99 {_ms(tpot['p99'])}",
        "experts": f"hit rate {_number(experts['hit_rate'], '.1%')} of {experts['activations']} "
        f"activations, {size(moved)} moved, {stats['eviction']}",
        "arena": f"{size(arena['bytes'])}: {arena['expert_slots']} slots of experts, "
        f"{arena['kv_slots']} of KV ({arena['kv_pages_used_peak']} of {arena['kv_pages']} pages at "
        f"peak), {arena['free_slots']} free",
    }
    if (placed := stats["placement"]) is not None:
        missed = experts["activations"] - experts["hits"]
        lines["beside"] = (
            f"{placed['experts']} of {missed} missed experts and {placed['rows']} rows computed by "
            f"the second processor; {placed['placement']}"
        )
    text = [f"{name:<8} {line}" for name, line in lines.items()]
    return "\n".join(text + [f"{'note':<8} {note}" for note in stats["notes"]])


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"


def write_stream(llm: Any, prompt: Prompt, params: SamplingParams) -> None:
    """Writes the text while it is generated, and a newline at its end even if it ends early."""
    piece = last = ""
    ended = False
    try:
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=bool(piece))
            last = piece or last
        ended = True
    finally:
        if (last or ended) and not last.endswith("\n"):
            print(flush=True)


def write_outputs(llm: Any, prompt: Prompt, params: SamplingParams) -> None:
    """Writes all texts of a prompt, and the log-probabilities of their tokens if they are asked
    for."""
    outputs = llm.generate([prompt], params, use_tqdm=False)[0].outputs
    for number, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            print(f"== {number} of {len(outputs)}")
        print(output.text)
        entries = zip(output.token_ids, output.logprobs or (), strict=False)
        for token, likely in entries:
            chosen = likely[token]
            others = sorted(likely.values(), key=lambda one: -one.logprob)[: params.logprobs]
            beside = ", ".join(f"{one.decoded_token!r} {one.logprob:.4f}" for one in others)
            print(f"{chosen.logprob:9.4f}  {chosen.decoded_token!r}  {beside}".rstrip())


def _read_prompt(prompt: str) -> str:
    try:
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        prompt.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8 text ({error})") from None
    return prompt
