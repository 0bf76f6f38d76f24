"""TTFT and time per output token of versions at equal memory, predicted at a size that is not here.

python -m scripts.precision speed DIR [--link 48GB/s] [--memory-bandwidth 3.4TB/s]

The cost model at the size of Qwen3-30B-A3B with the costs of an H200 as ../shared/DESIGN.md states
them. What can be measured on this machine is `moejax ablate
scripts/experiments/precision/times.yaml`.

Arms, all with the same bytes for experts: int4 and int8 for all (static; paged where they do not
fit), dense paged on demand (LRU), DynaExq over dense and int4 with everything resident, and the
same paged; and DynaExq against itself switched off: a fixed map of the residency that it begins
with.

Routing is as published of Qwen3 (generated); caches are warm from other sequences, whose counts are
DynaExq's scores at the start. All sequences arrive at once; their prompts are prefilled in order,
8192 tokens at a time, then all are decoded together (the engine would decode between two prefill
steps). TPOT is a decode step. What policies compute, and the copies that they look at, cost nothing
here. DynaExq's interval is shorter than its own default (4096 tokens), or hardly one would end
within a run. Writes DIR/predicted.jsonl, predicted.txt (every line, with floors) and predicted.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from host_offload.memory.budget import BudgetError
from moejax import UserError
from moejax.checkpoints.random_model import shape
from moejax.sizes import parse_rate, parse_size
from scripts.parts.commands import new_parser, refuse
from scripts.precision.costs import SOURCES, Decoding, Machine, check
from scripts.precision.predicted import Settings, predicted
from scripts.precision.speed_report import (
    batch_crossovers,
    crossover_text,
    detail_table,
    draw,
    overhead_text,
    predicted_table,
    share_crossovers,
)

SHARES = "0.25,0.27,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.98,1"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        for line in forecast(args):
            print(line, flush=True)
    except (UserError, BudgetError, OSError) as error:
        return refuse(__name__, error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="of results")
    batches, prompts = "1,2,4,8,16,32", "128,1024,4096"
    add("--batch", type=_numbers, default=_numbers(batches), help=f"default: {batches}")
    add("--prompt", type=_numbers, default=_numbers(prompts), help=f"tokens (default: {prompts})")
    add("--shares", default=SHARES, help="memory over all dense experts (default: %(default)s)")
    add("--steps", type=int, default=128, help="decode steps of each run (default: %(default)s)")
    add("--interval", default="512 tokens", help="DynaExq's (default: %(default)s)")
    add("--step-bytes", help="of transitions in a step (default: as the stage list allows)")
    add("--spares", type=int, default=2, help="DynaExq's, of each version (%(default)s)")
    machine = Machine()
    add("--link", type=parse_rate, default=int(machine.link), help="default: 48GB/s")
    add("--memory-bandwidth", type=parse_rate, default=int(machine.memory), help="default: 3.4TB/s")
    add("--matrix", type=float, default=machine.matrix, help="operations a second (%(default)s)")
    add("--overhead", type=float, default=machine.overhead, help="seconds a step (%(default)s)")
    text = "VERSION=FACTOR:SECONDS, an expert's time over dense and what a step takes longer"
    add("--decoding", action="append", default=[], metavar="VERSION=…", help=text)
    add("--no-plot", action="store_true", help="figures only, no matplotlib")
    return parser


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"numbers are from 1 on, not {text}")
    return sorted(set(found))


def forecast(args: argparse.Namespace) -> Iterator[str]:
    """the cost model at the size of Qwen3-30B-A3B"""
    if args.steps < 1 or args.spares < 1:
        raise UserError("--steps and --spares are from 1 on")
    machine = Machine(
        link=float(args.link),
        memory=float(args.memory_bandwidth),
        matrix=args.matrix,
        overhead=args.overhead,
        decoding={**Machine().decoding, **dict(map(parse_decoding, args.decoding))},
    )
    config = shape("qwen3-30b-a3b")
    limit = None if args.step_bytes is None else parse_size(args.step_bytes)
    settings = Settings(config, machine, args.steps, args.interval, limit, args.spares)
    shares = parse_shares(args.shares)
    lines = []
    with open(args.directory / "predicted.jsonl", "w") as file:
        for line in predicted(settings, args.batch, args.prompt, shares):
            lines.append({"date": datetime.date.today().isoformat(), **line})
            print(json.dumps(lines[-1]), file=file, flush=True)
        crossings = list(share_crossovers(lines))
        file.writelines(json.dumps(line) + "\n" for line in crossings)
    head = [
        "predicted: the cost model at the size of Qwen3-30B-A3B, generated qwen3-like routing; "
        "stated costs, none measured here",
        *(f"  {source}" for source in SOURCES),
        f"  used: {machine}",
        *(f"  check: {text}" for text in check(config, machine)),
    ]
    (args.directory / "predicted.txt").write_text("\n".join([*head, *detail_table(lines)]) + "\n")
    if not args.no_plot:
        title = "predicted (stated H200 costs), Qwen3-30B-A3B; dotted: p99"
        draw(lines, args.directory / "predicted.png", title)
    yield from head
    for figure, name in (("tpot_s", "TPOT"), ("ttft_s", "TTFT, mean over the batch")):
        yield f"\n{name}, ms, predicted, by memory for experts over all dense ones"
        yield from predicted_table(lines, figure)
    yield "\ncrossovers by memory, TPOT, predicted"
    yield from crossover_text(crossings)
    yield "\ncrossovers by batch, TPOT, predicted"
    for share in shares:
        at = [line for line in lines if line["share"] == share]
        yield from batch_crossovers(at, f"predicted at {share:.0%}")
    yield ""
    yield from overhead_text(lines)
    read = sum(line.get("prefill_read_through", 0) for line in lines)
    if read:
        yield f"{read} experts were read through in prefill steps, priced as read once"


def parse_shares(text: str) -> list[float]:
    """Raises UserError for anything but numbers above 0, up to 1."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = [0.0]
    if not 0 < found[0] <= found[-1] <= 1:
        raise UserError(f"--shares are numbers above 0 and up to 1, not {text!r}")
    return found


def parse_decoding(text: str) -> tuple[str, Decoding]:
    """(version, its costs) of VERSION=FACTOR:SECONDS. Raises UserError for anything else."""
    version, _, costs = text.partition("=")
    factor, _, latency = costs.partition(":")
    try:
        found = Decoding(float(factor), float(latency or 0))
    except ValueError:
        found = Decoding(-1.0, 0.0)
    if version not in Machine().decoding or not (found.factor > 0 <= found.latency):
        raise UserError(
            f"{text!r} is no VERSION=FACTOR:SECONDS; give one of "
            f"{', '.join(Machine().decoding)}, such as int4=0.42:0.0012"
        )
    return version, found
