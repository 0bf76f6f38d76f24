"""``moejax calibrate``: measures what steps cost on this machine, for policies and predictions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table
from moejax.commands.model import add_model, add_model_options, engine_options, start_llm
from moejax.errors import UserError

if TYPE_CHECKING:
    from host_offload.sizing.cost_model import CostModel

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


PARTS = {
    "step": "a step",
    "part": "a row or chunk",
    "span": "64 tokens of its context",
    "expert": "an active expert",
    "tile": "a further row tile of one",
    "filling": "a layer that fills cells",
    "fill": "an expert filled",
    "reading": "a layer that reads through",
    "read": "an expert read through",
}
"""Field of StepCost → what people read."""


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
        "--force", action="store_true", help="measure again, whatever was measured before"
    )
    add_model_options(calibrate, without=("trace",))
    output = calibrate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the file's content, and no table")
    output.add_argument("--quiet", action="store_true", help="no progress")


def _run(args: argparse.Namespace) -> int:
    # A named eviction: what is measured are steps with cells.
    options = {"eviction": "lru", **engine_options(args)}

    from moejax.costs.store import cost_file, identity
    from moejax.serve.costs import cost_model_for

    def report(what: str) -> None:
        if not (args.quiet or args.json):
            print(f"moejax: {what}", file=sys.stderr)

    with start_llm(args, options) as llm:
        path = cost_file(identity(llm.plan.steps))
        measured = args.force or not os.path.exists(path)
        model = cost_model_for(llm, force=args.force, report=report)
    if args.json:
        print(json.dumps({"file": str(path), **model.to_json()}, indent=2))
        return 0
    sizes = ", ".join(f"{value} {name}" for name, value in model.about["sizes"].items())
    print(f"{args.model}: {sizes}")
    print(f"{model.about['device']}, jax {model.about['jax']}, driver {model.about['driver']}")
    costs = {f"decode of {rows}": cost for rows, cost in sorted(model.decode.items())}
    costs["prefill"] = model.prefill
    steps = [
        (name, *(f"{getattr(cost, field) * 1e6:,.1f}" for cost in costs.values()))
        for field, name in PARTS.items()
    ]
    print_table(("what a step takes, µs", *costs), steps)
    print_table(("other figures", "value", "unit"), _figures(model))
    if not os.path.exists(path):
        raise UserError(f"these were measured, but cannot be kept: {path} cannot be written")
    print(f"{'measured, kept in' if measured else 'measured before, in'} {path}")
    return 0


def _figures(model: CostModel) -> Iterator[tuple[str, str, str]]:
    yield "one expert", "", format_bytes(model.expert_bytes)
    per_prompt_token = model.costs().prefill_s_per_token
    rows = [
        ("policies that look at a step", model.control * 1e6, "µs a step"),
        ("policies that look between layers", model.look * 1e6, "µs a layer"),
        ("one more prompt token", per_prompt_token * 1e6, "µs"),
        ("a prompt computed again", model.recompute_per_token * 1e6, "µs a token"),
        ("link", 1e-9 / model.link_per_byte, "GB/s"),
        ("computing beside a GB that moves", model.beside_per_byte * 1e12, "ms longer"),
        ("KV swapped", 1e-9 / model.kv_swap_per_byte, "GB/s"),
    ]
    if model.cpu_expert is not None:
        per_expert, per_token = (seconds * 1e6 for seconds in model.cpu_expert)
        rows += [
            ("expert on the CPU", per_expert, "µs"),
            ("expert on the CPU, a token", per_token, "µs"),
        ]
    for name, value, unit in rows:
        yield name, f"{value:,.1f}" if value else "", unit
