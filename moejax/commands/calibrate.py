"""``moejax calibrate``: measures what steps cost on this machine, for policies and predictions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from host_offload.memory.budget import format_bytes
from moejax.commands.options.engine import add_model_options, engine_options, notes_unsaid
from moejax.commands.tables import new_table, print_table
from moejax.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

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
  docs/cost_model.md says what is measured.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command; its `run` takes the parsed arguments and returns the exit status."""
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what a model's steps cost on this machine",
        description="Measure what a model's steps cost on this machine: each step's parts, experts "
        "moved by how\nmany move at once, KV that is swapped. Kept for policies and predictions.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    calibrate.set_defaults(run=_run)
    calibrate.add_argument(
        "model", metavar="MODEL", help="a Hugging Face or Orbax directory, or demo"
    )
    calibrate.add_argument(
        "--force", action="store_true", help="measure again, whatever was measured before"
    )
    add_model_options(calibrate)
    output = calibrate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the file's content, and no table")
    output.add_argument("--quiet", action="store_true", help="no progress")


def _run(args: argparse.Namespace) -> int:
    options = engine_options(args)

    from moejax import LLM
    from moejax.costs.store import cost_file, identity
    from moejax.serve.costs import cost_model_for

    progress = not (args.quiet or args.json)

    def report(what: str) -> None:
        if progress:
            print(f"moejax: {what}", file=sys.stderr)

    with notes_unsaid(), LLM(args.model, progress=progress, **options) as llm:
        path = cost_file(identity(llm.plan.steps))
        measured = args.force or not os.path.exists(path)
        model = cost_model_for(llm, force=args.force, report=report)
    if args.json:
        print(json.dumps({"file": str(path), **model.to_json()}, indent=2))
        return 0
    sizes = ", ".join(f"{value} {name}" for name, value in model.about["sizes"].items())
    print(f"{args.model}: {sizes}")
    print(f"{model.about['device']}, jax {model.about['jax']}, driver {model.about['driver']}")
    print_table(_steps(model))
    print_table(_moves(model))
    print_table(_rates(model))
    if not os.path.exists(path):
        raise UserError(f"these were measured, but cannot be kept: {path} cannot be written")
    print(f"{'measured, kept in' if measured else 'measured before, in'} {path}")
    return 0


def _steps(model: CostModel) -> Table:
    """Microseconds of what steps are made of."""
    table = new_table(
        "step, everything resident, µs", "step", "row or chunk", "span", "expert", "further tile"
    )
    costs = {f"decode of {rows} rows": cost for rows, cost in sorted(model.decode.items())}
    for name, cost in {**costs, "prefill": model.prefill}.items():
        table.add_row(name, *(f"{value * 1e6:,.1f}" for value in vars(cost).values()))
    return table


def _moves(model: CostModel) -> Table:
    """Microseconds by how many experts one layer moves at once."""
    tables = {"fill": model.fill, "read through": model.read_through, "staged": model.stage}
    counts = sorted({int(n) for found in tables.values() for n in found[:, 0]})
    table = new_table("experts moved in one layer, µs", *map(str, counts), "GB/s")
    for name, found in tables.items():
        seconds = dict(zip(found[:, 0].astype(int).tolist(), found[:, 1].tolist(), strict=True))
        shown = [f"{seconds[n] * 1e6:,.1f}" if n in seconds else "" for n in counts]
        most, last = found[-1]
        rate = f"{most * model.expert_bytes / last / 1e9:.1f}" if last else "–"
        table.add_row(name, *shown, rate)
    return table


def _rates(model: CostModel) -> Table:
    costs = model.costs()
    table = new_table("other figures", "value", "unit")
    rows: list[tuple[str, float, str]] = [
        ("one expert", 0, format_bytes(model.expert_bytes)),
        ("a list of transfers in a step", model.stage_list * 1e6, "µs a step"),
        ("policies that look at a step", model.control * 1e6, "µs a step"),
        ("expert filled in a prefill step", model.prefill_fill * 1e6, "µs"),
        ("expert read through in a prefill step", model.prefill_read_through * 1e6, "µs"),
        ("one more prompt token", costs.prefill_s_per_token * 1e6, "µs"),
        ("a prompt computed again", model.recompute_per_token * 1e6, "µs a token"),
        ("link", 1e-9 / model.link_per_byte, "GB/s"),
        ("memory", 1e-9 / model.memory_per_byte, "GB/s"),
        ("KV swapped", 1e-9 / model.kv_swap_per_byte, "GB/s"),
    ]
    if model.cpu_expert is not None:
        per_expert, per_token = model.cpu_expert * 1e6
        rows += [
            ("expert on the CPU", per_expert, "µs"),
            ("expert on the CPU, a token", per_token, "µs"),
        ]
    for name, value, unit in rows:
        table.add_row(name, f"{value:,.1f}" if value else "", unit)
    return table
