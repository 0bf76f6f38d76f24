"""``moejax plan`` says how fast a machine would be, and splits device memory between experts and
KV."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table
from moejax.commands.model import add_described, add_model_options, engine_options, write_options
from moejax.commands.plan_machine import OF_A_GPU, predict
from moejax.errors import UserError
from moejax.sizes import parse_size
from moejax.start.fields import Description
from moejax.start.option_values import read_transfers

if TYPE_CHECKING:
    from moejax.costs.workload_plan import PlannedSplit

_EPILOG = """\
examples:
  moejax plan Qwen/Qwen3-30B-A3B --gpu rtx4090 --precision int4
      tokens a second and time to the first token on a machine that is not at hand; only the
      model's config.json is read; --expert-budget 25%,50% and --eviction lru,lfu compare
  moejax generate --input prompts.jsonl --output out.jsonl --trace t; moejax calibrate demo
      what a plan is made from: the workload's trace and this machine's costs
  moejax plan --trace t --memory 4MiB --output plan.json
      the split of 4 MiB between experts and KV, cells of each layer, and what is predicted; the
      cells that each user of the trace needs, and all together;
      moejax generate "The old house" --config plan.json runs with it
  moejax plan --trace t --memory 4MiB --timeline plan.json
      what three layers would do when with that split; FILE.json has all steps, for Perfetto
  moejax plan --trace t --remember
      from now on runs of the trace's model without numbers are split by it
  moejax plan --dry-run demo --memory 4MiB --max-num-seqs 4
      what a run with these options would decide at its start, without reading weights

Figures are predictions from miss curves and measured costs (docs/how-to/memory.md).
"""

_OF_A_TRACE = {
    "costs": Description(
        "costs that moejax calibrate wrote (default: the newest of the trace's model here)",
        metavar="FILE",
    ),
    "timeline": Description(
        "write what the trace's steps would do when with that split, FILE.json for "
        "https://ui.perfetto.dev",
        metavar="FILE",
    ),
    "output": Description("write the split as options for --config FILE", metavar="FILE"),
    "remember": Description(
        "from now on, split runs of the trace's model by this trace, if they name no split, costs "
        "were measured and not everything fits",
        type=bool,
        default=False,
    ),
}
"""Options of a plan from a trace, which --dry-run does not have."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    plan = add_command(
        commands,
        "plan",
        _run,
        "predict a machine's speed, or split a memory by a trace",
        _EPILOG,
        "Predict how fast a model runs on a machine that is not at hand, or say how to split a\n"
        "memory between experts and KV, from a trace of the workload and this machine's costs.",
    )
    plan.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="with --gpu or --dry-run: a checkpoint directory, a Hub id, a config.json, or demo",
    )
    add_described(plan, OF_A_GPU)
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="print what a run of MODEL with these options would decide at its start, without "
        "reading weights",
    )
    plan.add_argument(
        "--trace",
        dest="workload",
        metavar="DIR",
        help="trace of the workload, from generate --trace DIR",
    )
    add_described(plan, _OF_A_TRACE)
    plan.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
    add_model_options(plan, without=("trace",))


def _run(args: argparse.Namespace) -> int:
    if args.gpu is not None:
        for name in ("dry_run", *_OF_A_TRACE):
            if getattr(args, name):
                raise UserError(f"--{name.replace('_', '-')} does not go with --gpu")
        return predict(args)
    for name in OF_A_GPU:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} goes with --gpu")
    if args.dry_run:
        return _dry_run(args)
    _check_of_a_trace(args)
    if args.memory is not None and not args.remember:
        return _split(args, parse_size(args.memory))
    if args.remember and args.memory is None and not (args.timeline or args.output):
        return _remember(args)
    raise UserError("give --memory for a split, or --remember alone")


def _split(args: argparse.Namespace, memory: int) -> int:
    from host_offload.simulate.timeline import Link
    from moejax.costs.workload_plan import Planner, costs_of_trace, open_trace
    from moejax.traces.timeline import check_timeline, write_timeline

    if args.timeline:
        check_timeline(args.timeline)
    wanted, queue = read_transfers(args.transfers), None
    if wanted.rate is not None:
        queue = Link(wanted.rate, wanted.latency or 0.0)
    elif wanted.stated:
        raise UserError("latency of --transfers is of a link; give its rate too")
    trace = open_trace(args.workload)
    planner = Planner(trace, costs_of_trace(trace, args.costs), queue)
    cells, overflow = args.cells or "uniform", args.kv_overflow or "swap"
    plan = planner.split(memory, cells=cells, kv_overflow=overflow)
    if args.timeline:
        write_timeline(args.timeline, planner.timeline(plan))
    if args.output:
        write_options(args.output, plan.options())
    if args.json:
        print(json.dumps({**dataclasses.asdict(plan), "options": plan.options()}, indent=2))
    else:
        _print_plan(plan, args.output)
    return 0


_SPLIT = {"memory", "cells", "kv_overflow", "transfers"}
"""Options of a run's start that a plan from a trace has too."""


def _check_of_a_trace(args: argparse.Namespace) -> None:
    """Raises UserError for options of a run's start that a plan from a trace does not have."""
    if args.workload is None:
        raise UserError("name the trace of a workload (--trace DIR), or --dry-run and a model")
    options = engine_options(args)
    named = ["MODEL"] if args.model is not None else []
    named += ["--config"] if args.config is not None else []
    named += ["--" + name.replace("_", "-") for name in sorted(options.keys() - _SPLIT)]
    if named:
        raise UserError(f"{named[0]} goes with --dry-run; a plan from a trace does not take it")
    if options.get("cells") not in (None, "uniform", "marginal"):
        raise UserError("--cells of a plan is uniform or marginal")


def _dry_run(args: argparse.Namespace) -> int:
    for name in ("workload", *_OF_A_TRACE):
        if getattr(args, name):
            flag = "trace" if name == "workload" else name
            raise UserError(f"--{flag} goes with a plan from a trace; leave it or --dry-run out")
    if args.model is None:
        raise UserError("--dry-run needs a model: moejax plan --dry-run MODEL")

    from moejax.start.options import Config
    from moejax.start.report.dry_run import dry_run

    plan, assumed = dry_run(Config.of(args.model, **engine_options(args)))
    if args.json:
        notes = {"notes": list(plan.budget.notes), "assumed": list(assumed)}
        print(json.dumps({**plan.describe(), **notes}, indent=2))
        return 0
    print(plan)
    print("\n".join(f"assumed: {text}" for text in assumed))
    return 0


def _remember(args: argparse.Namespace) -> int:
    from moejax.costs.workload_plan import open_trace, workload_spec
    from moejax.start.decide.split import remember

    trace = open_trace(args.workload)
    workload_spec(trace)  # raises for a trace from which no plan can be made
    file = remember(trace)
    if args.json:
        print(json.dumps({"file": str(file)}))
    else:
        print(f"runs of this model without numbers are split by {trace.directory}")
        print(f"as {file} says; delete that to forget it")
    return 0


def _print_plan(plan: PlannedSplit, output: str | None) -> None:
    cells = f"{min(plan.cells)} to {max(plan.cells)} cells a layer"
    pages = f"{plan.kv_pages} pages, {plan.kv_tokens} tokens"
    parts = (
        ("experts", plan.expert_bytes, cells),
        ("KV", plan.kv_bytes, pages),
        ("free", plan.memory - plan.expert_bytes - plan.kv_bytes, ""),
        ("memory", plan.memory, ""),
    )
    slot = plan.slot_bytes
    shown = ((name, format_bytes(size), str(size // slot), what) for name, size, what in parts)
    print_table(("split", "bytes", "slots", ""), shown)
    print("cells of each layer:", " ".join(map(str, plan.cells)))
    _print_working_sets(plan)
    share = plan.expert_misses / max(plan.references, 1)
    predicted = {
        "expert misses, first sights left out": f"{plan.expert_misses:,.0f}",
        "share of references": f"{share:.1%}",
        "experts over the link, first sights too": format_bytes(plan.link_bytes),
        "KV pages that come back": f"{plan.kv_misses:,.0f}",
        "time of both": f"{plan.miss_s * 1e3:,.1f} ms",
    }
    if plan.step_s is not None:
        predicted["time per token (a decode step)"] = f"{plan.step_s * 1e3:,.3f} ms"
    predicted["generated tokens a second"] = f"{plan.tokens_per_s:,.1f}"
    print_table(("predicted for the trace", ""), predicted.items())
    if output:
        print(f"written to {output}; run with --config {output}")
        return
    options = f"--expert-budget {plan.expert_bytes} --kv-budget {plan.kv_bytes}"
    if "cells" in plan.options():
        options += f" --cells {','.join(map(str, plan.cells))}"
    print(options)


def _print_working_sets(plan: PlannedSplit) -> None:
    from host_offload.sizing.right_size import EPSILON

    print(f"cells a layer with which at most {EPSILON:.0%} of warm references miss: for LRU, by")
    print("reuse distances, and as co-activation predicts")
    rows = []
    for one in plan.working_sets:
        row = ["everybody" if one.user is None else f"user {one.user}", f"{one.tokens:,}"]
        for cells in (one.by_reuse, one.by_coactivation):
            if cells is None:
                row += ["–", "–"]
            else:
                size = format_bytes(sum(cells) * plan.slot_bytes)
                row += [f"{min(cells)} to {max(cells)}", size]
        rows.append(row)
    print_table(("who", "tokens", "LRU", "bytes", "predicted", "bytes"), rows)
