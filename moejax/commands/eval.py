"""``moejax eval`` measures a model's perplexity on texts, and its results in tasks.

Large modules are imported only after the files are checked, so that mistakes are reported at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, align_rows, say
from moejax.commands.model import (
    CLUSTER,
    MODEL_HELP,
    add_described,
    add_model_options,
    connect_cluster,
    engine_options,
    pick_arguments,
    start_llm,
    wants_cluster,
)
from moejax.errors import UserError, user_errors
from moejax.start.fields import Description
from moejax.start.options import OPTIONS

if TYPE_CHECKING:
    from moejax.evaluate.comparison import Comparison
    from moejax.evaluate.evaluation import Likelihood, PerplexityResult
    from moejax.evaluate.json_lines import LineFile
    from moejax.evaluate.token_ids import TokenIds
    from moejax.serve.llm import LLM

_LM_EVAL = "lm-eval:"
_WINDOWS = {
    "window": Description(
        "tokens that are computed together (default: 2048, at most --max-model-len)", type=int
    ),
    "stride": Description(
        "tokens from the start of one window to the next (default: half a window)", type=int
    ),
    "limit": Description(
        "only the first N tokens of each file, or the first N documents of an lm-eval task",
        type=int,
    ),
}
_TASKS = {
    "num_fewshot": Description(
        "examples before each document (default: that of the task)", type=int
    ),
    "include_path": Description("a directory with .yaml files of tasks", metavar="DIR"),
    "apply_chat_template": Description(
        "format documents as messages with the tokenizer's chat template", type=bool, default=False
    ),
}
_STEPS = {
    "timeout": Description(
        "end when no new step came for that many seconds; 0: take the steps that exist (default: "
        "wait forever)",
        type=float,
        metavar="SECONDS",
    ),
    "until_step": Description("end after this step or a later one", type=int),
}
_EPILOG = """\
examples:
  moejax eval demo --task perplexity --data book.txt code.txt
      a line for each file, and one for all together
  moejax eval /models/Qwen3-30B-A3B --task perplexity --data wiki.txt --memory 16GiB --json
      the same numbers to the last bit as with all experts resident, and what the run cost
  moejax eval demo --task perplexity --data book.txt --window 512 --stride 512 --limit 20000
      windows that do not overlap, over the first 20000 tokens
  moejax eval /models/Qwen3-30B-A3B --task lm-eval:arc_easy,hellaswag --expert-budget 25%
      tasks of lm-evaluation-harness; needs pip install 'moejax[lm-eval]'
  moejax eval /runs/7 --name-map map.yaml --task perplexity --token-ids val.bin \\
      --every-step --output val.jsonl
      a row for each step of a training run as it is written; the same command goes on after a kill
  moejax eval --compare a.jsonl b.jsonl
      two runs' --output, paired, with 95% intervals

windows:
  As in transformers' "Perplexity of fixed-length models": windows begin every --stride tokens, and
  each scores what the one before did not reach, so every token but a file's first is scored once.
  With --stride equal to --window nothing overlaps, and the first token of each window, which has no
  context, is not scored. docs/reference/evaluation.md has the fields of --json.

exit status:
  0 done, 2 a mistake that the message explains, 130 interrupted (Ctrl-C), 141 stdout was closed
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    evaluate = add_command(
        commands,
        "eval",
        _run,
        "measure a model's perplexity on text files, or its results in lm-eval's tasks",
        _EPILOG,
        "Measure how likely a model finds files of text or token ids, or how well it does tasks\n"
        "of lm-evaluation-harness. Results go to stdout, progress and what the run cost to stderr.",
    )
    evaluate.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    task = evaluate.add_argument_group("task")
    task.add_argument(
        "--task", type=_task, help="perplexity, or lm-eval:NAME,... for tasks of lm-eval"
    )
    task.add_argument("--data", nargs="+", metavar="FILE", default=[], help="text files in UTF-8")
    task.add_argument(
        "--token-ids",
        nargs="+",
        metavar="FILE",
        default=[],
        help="files of token ids: .npy, .bin or .jsonl",
    )
    task.add_argument(
        "--token-dtype",
        default="uint16",
        help="type of the numbers in a .bin file (default: uint16)",
    )
    add_described(task, _WINDOWS)
    add_described(task, _TASKS)
    runs = evaluate.add_argument_group("training runs, and pairs of runs")
    runs.add_argument(
        "--every-step", action="store_true", help="evaluate each step of MODEL, an Orbax root"
    )
    add_described(runs, _STEPS)
    runs.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="compare what --output wrote for two runs"
    )
    add_model_options(evaluate)
    add_described(evaluate.add_argument_group("several machines"), CLUSTER)
    output = evaluate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, and no progress")
    output.add_argument("--quiet", action="store_true", help="results only")
    output.add_argument(
        "--output",
        metavar="FILE",
        help="also write one JSON line per run or step, for --compare; existing steps are not "
        "computed again",
    )


def _task(text: str) -> str:
    if text == "perplexity" or (text.startswith(_LM_EVAL) and text != _LM_EVAL):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither perplexity nor lm-eval:NAME,..., such as lm-eval:arc_easy,hellaswag"
    )


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The results of one run: the --json object, the units that --compare pairs, and the table."""

    report: dict[str, Any]
    units: list[Any]
    table: str
    figures: dict[str, float]
    """The figures of a row of --every-step, by name."""
    cost: str = ""


@dataclasses.dataclass(frozen=True)
class _Job:
    """What to evaluate.

    asked: the settings that decide the figures, for the lines of --output.
    """

    asked: dict[str, Any]
    run: Callable[[Any, bool], _Outcome]
    """Evaluates an LLM, or for perplexity also on a cluster, given its Scale. The second argument
    is whether to show a bar."""


def _run(args: argparse.Namespace) -> int:
    return _compare(args) if args.compare else _evaluate(args)


def _evaluate(args: argparse.Namespace) -> int:
    if args.model is None or args.task is None:
        args.parser.error("the following arguments are required: MODEL, --task (or --compare A B)")
    on_cluster = wants_cluster(args)
    if on_cluster and (args.every_step or args.trace is not None):
        raise UserError("--ray shares out one run; leave out --every-step and --trace")
    if on_cluster and args.task != "perplexity":
        raise UserError(
            "--ray is for --task perplexity: lm-eval drives one model; give each machine some tasks"
        )
    if not args.every_step:
        _refuse_given(args, _STEPS, "of --every-step; add that")
    from host_offload.policies.placement.placement_names import deferred
    from moejax.start.provenance import DEFAULTS, by_content, weights_of

    options = engine_options(args)
    job = _perplexity(args, options) if args.task == "perplexity" else _tasks(args)
    # A run may continue with another budget, since that changes no figure. With cache-aware routing
    # or deferred experts it does, so there all options count.
    with user_errors():
        late = deferred(options.get("placement")) > 0
    free = options.get("cache_aware_routing") is None and not late
    kept = {n: v for n, v in options.items() if not free or OPTIONS[n].changes_bits}
    found = {"options": by_content(kept), "defaults": DEFAULTS}
    job = dataclasses.replace(job, asked={**job.asked, **found})
    if args.every_step:
        return _every_step(args, options, job)
    shown = not (args.quiet or args.json)
    with _lines(args, job) as lines:
        with connect_cluster(args) if on_cluster else start_llm(args, options) as where:
            found = job.run(where, shown)
        found.report["run"]["options"] = options
        if lines is not None:
            lines.append(_line(None, job, found, weights_of(str(args.model), options.get("step"))))
    if args.json:
        print(json.dumps(found.report, indent=2))
        return 0
    print(found.table)
    if found.cost and not args.quiet:
        print("\n" + found.cost, file=sys.stderr)
    return 0


def _perplexity(args: argparse.Namespace, options: dict[str, Any]) -> _Job:
    windows = pick_arguments(args, _WINDOWS)
    _refuse_given(args, _TASKS, "of lm-eval's tasks, not of perplexity")
    if not (args.data or args.token_ids):
        args.parser.error("--task perplexity needs --data FILE..., or --token-ids FILE...")
    named = [*args.data, *args.token_ids]
    for name in named:
        if named.count(name) > 1:
            raise UserError(
                f"{name} is named twice in --data and --token-ids; each file is scored once"
            )
    texts: dict[str, str | TokenIds] = {name: _read_text(name) for name in args.data}

    from moejax.evaluate.token_ids import read_token_ids

    texts |= {name: read_token_ids(name, args.token_dtype) for name in args.token_ids}

    from moejax.evaluate.evaluation import (
        check_windows,
        perplexity,
        result_json,
        text_sha256,
        window_units,
    )

    check_windows(**windows)

    def run(where: Any, progress: bool) -> _Outcome:
        if args.ray is None:
            result = perplexity(where, texts, **windows, progress=progress)
        else:
            from moejax.evaluate.cluster.perplexity import cluster_perplexity

            result = cluster_perplexity(
                args.model, texts, options, where, **windows, progress=progress, warn=say
            )
        report, total = result_json(result), result.total
        figures = {"bits/token": total.bits_per_token, "perplexity": total.perplexity}
        cost = format_cost(report["run"])
        return _Outcome(report, window_units(result), format_perplexity(result), figures, cost)

    data = [text_sha256(text) for text in texts.values()]
    return _Job({"task": args.task, **windows, "data": data}, run)


def _tasks(args: argparse.Namespace) -> _Job:
    _refuse_given(args, ("data", "token_ids", "window", "stride"), "of perplexity, not of tasks")
    try:
        from moejax.evaluate.harness.tasks import (
            TaskOptions,
            document_units,
            run_tasks,
            task_manager,
            tasks_json,
        )
    except ImportError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise UserError(
            "tasks of lm-eval need lm-evaluation-harness: pip install 'moejax[lm-eval]'"
        ) from None
    names = args.task.removeprefix(_LM_EVAL).split(",")
    options = TaskOptions(limit=args.limit, **pick_arguments(args, _TASKS))
    manager = task_manager(names, options.include_path)

    def run(llm: LLM, progress: bool) -> _Outcome:
        found = run_tasks(llm, names, manager, options)
        report = tasks_json(llm, found, options)
        figures = {
            f"{task} {name.removesuffix(',none')}": float(value)
            for task, metrics in report["results"].items()
            for name, value in metrics.items()
            if "," in name and "_stderr," not in name and isinstance(value, int | float)
        }
        return _Outcome(report, document_units(found), format_tasks(report), figures)

    return _Job({"task": args.task, "limit": args.limit, **pick_arguments(args, _TASKS)}, run)


def _refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises UserError for an option that is given but has no meaning here.

    - `names`: the options without a meaning.
    - `why`: ends the message, after "--option is".
    """
    for name, value in pick_arguments(args, names).items():
        if value is not None and value is not False and value != []:
            raise UserError(f"--{name.replace('_', '-')} is {why}")


def _every_step(args: argparse.Namespace, options: dict[str, Any], job: _Job) -> int:
    from moejax.checkpoints.fingerprint import fingerprint
    from moejax.checkpoints.orbax.steps import finished_steps
    from moejax.evaluate.every_step import new_steps
    from moejax.evaluate.results_file import require_same_weights

    if "step" in options:
        raise UserError("--every-step evaluates all steps; leave out --step")
    with _lines(args, job) as lines:
        done = {line["step"] for line in lines.lines} - {None} if lines is not None else set()
        present = finished_steps(Path(args.model)) if done else ()
        for line in lines.lines if lines is not None else ():
            if line["step"] in present:
                require_same_weights(args.output, line, fingerprint(args.model, line["step"]))
        if done and not (args.quiet or args.json):
            print(f"{args.output} has {len(done)} steps already", file=sys.stderr)
        for step in new_steps(args.model, done, **pick_arguments(args, _STEPS)):
            try:
                weights = fingerprint(args.model, step)
                with start_llm(args, {**options, "step": step}) as llm:
                    found = job.run(llm, not (args.quiet or args.json))
            except UserError:
                if step in finished_steps(Path(args.model)):
                    raise
                print(f"step {step} was deleted before it was read", file=sys.stderr)
                continue
            found.report["run"]["options"] = options
            if lines is not None:
                lines.append(_line(step, job, found, weights))
            if args.json:
                print(json.dumps({"step": step, **found.report}), flush=True)
            else:
                figures = "  ".join(f"{name} {value:.4f}" for name, value in found.figures.items())
                print(f"step {step:>8}  {figures}", flush=True)
    return 0


def _lines(
    args: argparse.Namespace, job: _Job
) -> contextlib.AbstractContextManager[LineFile | None]:
    """Opens --output; yields None without it."""
    from moejax.evaluate.results_file import open_lines

    if args.output is None:
        return contextlib.nullcontext()
    return open_lines(args.output, job.asked, resume=args.every_step)


def _line(step: int | None, job: _Job, found: _Outcome, weights: str | None) -> dict[str, Any]:
    units = [dataclasses.asdict(one) for one in found.units]
    made = {"step": step, "asked": job.asked, "weights": weights}
    return {**made, **found.report, "units": units}


def _compare(args: argparse.Namespace) -> int:
    if args.model is not None or args.task is not None:
        raise UserError("--compare reads two files of results and runs no model; leave out MODEL")

    from moejax.evaluate.comparison import FEW, compare_lines
    from moejax.evaluate.results_file import read_lines

    lines = [read_lines(name) for name in args.compare]
    found = compare_lines(*lines)
    steps = [{line["step"] for line in of_one} for of_one in lines]
    for name, mine, theirs in zip(args.compare, steps, reversed(steps), strict=True):
        if len(mine) > 1 and (left := sorted(mine - theirs)) and not args.quiet:
            print(f"note: only {name} has step {', '.join(map(str, left))}", file=sys.stderr)
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
        return 0
    print(format_comparison(found))
    if not args.quiet and any(one.pairs < FEW for one in found):
        print(f"note: with fewer than {FEW} pairs a normal interval is rough", file=sys.stderr)
    return 0


def _read_text(name: str) -> str:
    """Reads a file's text without changing its line ends. Raises UserError for a file that is
    empty, cannot be read or is not UTF-8."""
    try:
        text = Path(name).read_bytes().decode()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}; "
            f"convert it first, as with iconv -t UTF-8, or give a file of token ids as --token-ids"
        ) from None
    if not text:
        raise UserError(f"{name} is empty; there is nothing to score")
    return text


# ---- tables


def format_perplexity(result: PerplexityResult) -> str:
    """The table of perplexities: a row for each text, and one for all if there are several."""
    rows: list[tuple[str, Likelihood]] = [(text.name, text) for text in result.texts]
    if len(rows) > 1:
        rows.append(("all", result.total))
    cells = [("", "tokens", "scored", "bits/token", "bits/byte", "perplexity")]
    for name, found in rows:
        by_byte = "–" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
        counts = f"{found.tokens:,}", f"{found.scored_tokens:,}"
        figures = f"{found.bits_per_token:.4f}", by_byte, f"{found.perplexity:.4f}"
        cells.append((name, *counts, *figures))
    return align_rows(cells)


def format_tasks(report: Mapping[str, Any]) -> str:
    """The table of tasks: a row for each metric, with the harness's standard error.

    - `report`: the --json object.
    """
    cells = [("task", "metric", "documents", "value", "± stderr")]
    for task, figures in report["results"].items():
        documents = report["tasks"]["n-samples"].get(task, {}).get("effective", "")
        for name, value in figures.items():
            metric, _, kept = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kept:
                continue
            error = figures.get(f"{metric}_stderr,{kept}")
            shown = f"{error:.4f}" if isinstance(error, int | float) else "–"
            label = metric if kept == "none" else name
            cells.append((task, label, str(documents), f"{value:.4f}", shown))
    return align_rows(cells)


def format_comparison(found: Sequence[Comparison]) -> str:
    """The table of a comparison: a row for each figure of both runs."""
    cells = [("", "step", "figure", "pairs", "A", "B", "B − A", "95% interval")]
    stepped = any(one.step_a is not None for one in found)
    for one in found:
        steps = {one.step_a, one.step_b}
        step = (
            ("all" if stepped else "–")
            if steps == {None}
            else "/".join(str(s) for s in dict.fromkeys(steps))
        )
        interval = "–" if one.low is None else f"[{one.low:+.4f}, {one.high:+.4f}]"
        figures = f"{one.a:.4f}", f"{one.b:.4f}", f"{one.difference:+.4f}", interval
        cells.append((one.name, step, one.figure, str(one.pairs), *figures))
    return align_rows(cells)


def format_cost(run: Mapping[str, Any]) -> str:
    """The cost of a perplexity run in lines of text.

    - `run`: the part "run" of the --json object.
    """
    hit_rate = "–" if run["hit_rate"] is None else f"{run['hit_rate']:.1%}"
    lines = [
        f"speed    {run['computed_tokens']} tokens computed in {run['seconds']:.2f} s, of which "
        f"{run['compile_s']:.2f} s compiled; {run['tokens_per_s']:.0f} tokens/s",
        f"experts  hit rate {hit_rate} of {run['activations']} activations ({run['fills']} fills, "
        f"{run['read_through']} read through), {run['eviction']}",
        f"moved    {format_bytes(run['fill_bytes'])} filled, "
        f"{format_bytes(run['read_through_bytes'])} read through in "
        f"{run['prefill_steps']} prefill steps",
    ]
    return "\n".join(lines + [f"note     {note}" for note in run["notes"]])
