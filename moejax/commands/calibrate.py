"""``moejax calibrate``: measures what steps cost on this machine, for policies and predictions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table
from moejax.commands.model import add_model, add_model_options, engine_options, start_llm
from moejax.errors import UserError

_EPILOG = """\
examples:
  moejax calibrate demo
      measures, or shows what was measured before, and says where it is kept
  moejax calibrate /models/Qwen3-30B-A3B --memory 24GiB --max-num-seqs 32 --force
      measures again, for runs that begin with the same options
  moejax calibrate demo --json > costs.json

what costs are of:
  this machine and device, jax's version, the ops, the driver, the model, and the start-up shapes
  (--max-num-seqs, --max-model-len, --max-num-batched-tokens). Budgets and policies may be others.
  A small budget leaves fewer experts to measure with, so give as much memory as there is.
  docs/explanation/cost_model.md says what is measured.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    calibrate = add_command(
        commands,
        "calibrate",
        _run,
        "measure what a model's steps cost on this machine",
        _EPILOG,
        "Measure what a model's steps cost on this machine: each step's parts, experts moved by "
        "how\nmany move at once, KV that is swapped. Kept for policies and predictions.",
    )
    add_model(calibrate)
    calibrate.add_argument(
        "--force", action="store_true", help="measure again, even if costs exist"
    )
    add_model_options(calibrate, without=("trace",))
    output = calibrate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the file instead of the table")
    output.add_argument("--quiet", action="store_true", help="no progress")


def _run(args: argparse.Namespace) -> int:
    # A named eviction, since the steps to measure have cells.
    options = {"eviction": "lru", **engine_options(args)}

    from moejax.costs.store import cost_file, identity
    from moejax.serve.costs import cost_model_for

    def report(what: str) -> None:
        if not (args.quiet or args.json):
            print(f"moejax: {what}", file=sys.stderr)

    with start_llm(args, options) as llm:
        path = cost_file(identity(llm.plan.steps))
        before = os.stat(path).st_mtime_ns if os.path.exists(path) else None
        model = cost_model_for(llm, force=args.force, report=report)
        measured = not os.path.exists(path) or os.stat(path).st_mtime_ns != before
    if args.json:
        print(json.dumps({"file": str(path), **model.to_json()}, indent=2))
        return 0
    sizes = ", ".join(f"{value} {name}" for name, value in model.about["sizes"].items())
    print(f"{args.model}: {sizes}")
    print(f"{model.about['device']}, jax {model.about['jax']}, driver {model.about['driver']}")
    if (others := model.about.get("others")) is not None:
        print(f"other programs took {others:.0%} of the processors meanwhile")
    costs = {f"decode of {rows}": cost for rows, cost in sorted(model.decode.items())}
    costs["prefill"] = model.prefill
    parts = [field.name for field in dataclasses.fields(model.prefill)]
    print_table(
        ("µs (docs/cost_model.md)", *costs),
        [
            (name, *(f"{getattr(cost, name) * 1e6:,.1f}" for cost in costs.values()))
            for name in parts
        ],
    )
    figures = {
        "one expert": format_bytes(model.expert_bytes),
        "one more prompt token": f"{model.costs().prefill_s_per_token * 1e6:,.1f} µs",
        "link": f"{1e-9 / model.link_per_byte:,.1f} GB/s",
        "KV swapped": f"{1e-9 / model.kv_swap_per_byte:,.1f} GB/s",
    }
    print_table(("other figures (--json has all)", ""), figures.items())
    if not os.path.exists(path):
        raise UserError(f"these were measured, but cannot be kept: {path} cannot be written")
    print(f"{'measured, kept in' if measured else 'measured before, in'} {path}")
    return 0
