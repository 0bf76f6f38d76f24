"""TTFT and time per output token of versions at equal memory, predicted at a size that is not here.

python -m scripts.precision speed DIR [--batch 1,8] [--prompt 128] [--shares 0.5,1]

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
here. Writes DIR/predicted.jsonl (every line, with floors) and predicted.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax import UserError
from moejax.checkpoints.random_model import shape
from scripts.parts.bench_engine import parse_numbers
from scripts.parts.commands import new_parser, refusing
from scripts.parts.plots import pyplot
from scripts.parts.text_table import aligned
from scripts.precision.costs import SOURCES, Machine, check
from scripts.precision.predicted import OFF, Settings, predicted

Line = Mapping[str, Any]

SHARES = "0.25,0.27,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.98,1"

PAIRS = (
    ("dense, paged", "int4, static"),
    ("dense, paged", "DynaExq"),
    ("DynaExq", "int4, static"),
    ("DynaExq", "int8, static"),
    ("int8, static", "int4, static"),
    ("dense, paged", "DynaExq, paged"),
    ("DynaExq", "DynaExq, paged"),
)
"""Arms whose crossover is named: from where on the first one is faster than the second."""


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    for line in forecast(args):
        print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="of results")
    add("--batch", default="1,2,4,8,16,32", help="(default: %(default)s)")
    add("--prompt", default="128,1024,4096", help="tokens (default: %(default)s)")
    add("--shares", default=SHARES, help="memory over all dense experts (default: %(default)s)")
    add("--steps", type=int, default=128, help="decode steps of each run (default: %(default)s)")
    return parser


def forecast(args: argparse.Namespace) -> Iterator[str]:
    batches = sorted({*parse_numbers(args.batch, "--batch", least=1)})
    prompts = sorted({*parse_numbers(args.prompt, "--prompt", least=1)})
    shares = parse_shares(args.shares)
    if args.steps < 1:
        raise UserError("--steps is from 1 on")
    plt = pyplot()
    args.directory.mkdir(parents=True, exist_ok=True)
    config, machine = shape("qwen3-30b-a3b"), Machine()
    yield "predicted: the cost model at the size of Qwen3-30B-A3B, generated qwen3-like routing; "
    yield "stated costs, none measured here"
    yield from (f"  {source}" for source in SOURCES)
    yield from (f"  check: {text}" for text in check(config, machine))
    lines = []
    with open(args.directory / "predicted.jsonl", "w") as file:
        for line in predicted(Settings(config, machine, args.steps), batches, prompts, shares):
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
    draw(plt, lines, args.directory / "predicted.png")
    for figure, name in (("tpot_s", "TPOT"), ("ttft_s", "TTFT, mean over the batch")):
        yield f"\n{name}, ms, predicted, by memory for experts over all dense ones"
        yield from table(lines, figure)
    yield "\ncrossovers by memory, TPOT, predicted"
    yield from crossovers(lines)
    yield ""
    yield from overheads(lines)
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


# ---- tables


def table(lines: Sequence[Line], figure: str) -> Iterator[str]:
    """Milliseconds; a row for each batch, prompt and arm, a column for each memory."""
    shares, rows = [f"{share:.0%}" for share in sorted({x["share"] for x in lines})], []
    for place, of_arm in _grouped(lines, "batch", "prompt", "arm"):
        cells = {f"{x['share']:.0%}": x[figure] and x[figure] * 1e3 for x in of_arm}
        rows.append(place | dict.fromkeys(shares) | cells)
    columns = [(name, "{" + name + "}") for name in ("batch", "prompt", "arm")]
    columns += [(share, "{" + share + ":.2f}") for share in shares]
    yield from aligned(columns, rows)


def crossovers(lines: Sequence[Line]) -> Iterator[str]:
    """For each pair, prompt and batch the memory from which on the first arm's TPOT is below the
    second's throughout."""
    for (first, second), (at, here) in itertools.product(PAIRS, _grouped(lines, "prompt", "batch")):
        times = {
            name: {x["share"]: x["tpot_s"] for x in here if x["arm"] == name and x["tpot_s"]}
            for name in (first, second)
        }
        common = sorted(times[first].keys() & times[second].keys())
        slower = [x for x in common if times[first][x] >= times[second][x]]
        faster = [x for x in common if not slower or x > slower[-1]]
        if not common:
            continue
        where = f"from {faster[0]:.0%} on" if faster else "never"
        below = f"not at {slower[-1]:.0%}" if slower else "the least at which both run"
        place = f"prompt {at['prompt']}, batch {at['batch']}"
        yield f"{place}: {first} is faster than {second} {where} ({below})"


def overheads(lines: Sequence[Line]) -> Iterator[str]:
    """DynaExq over the fixed map of the same residency, TPOT."""
    ratios: dict[int, list[tuple[float, Line]]] = {}
    for at, here in _grouped(lines, "batch", "prompt", "share"):
        arms = {line["arm"]: line for line in here}
        if OFF in arms:
            ratio = arms["DynaExq"]["tpot_s"] / arms[OFF]["tpot_s"]
            ratios.setdefault(at["batch"], []).append((ratio, arms["DynaExq"]))
    for batch, found in ratios.items():
        worst, line = max(found, key=lambda x: x[0])
        yield (
            f"batch {batch}: DynaExq on / off, TPOT at most {worst:.3f} (prompt {line['prompt']}, "
            f"{line['share']:.0%}, {line['staged']:.2f} transitions a step); above 1.05 in "
            f"{sum(ratio > 1.05 for ratio, _ in found)} of {len(found)} places"
        )


def _grouped(lines: Sequence[Line], *names: str) -> Iterator[tuple[dict[str, Any], list[Line]]]:
    """Lines that agree in these, in the order in which they first come."""
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    for key, found in groups.items():
        yield dict(zip(names, key, strict=True)), found


def draw(plt: Any, lines: Sequence[Line], path: Path) -> None:
    """TPOT (mean, and p99 dotted) against memory, a panel for each of up to three batches and
    prompts."""
    shown = [line for line in lines if line["tpot_s"] is not None and line["arm"] != OFF]
    batches, prompts = (_three(sorted({x[name] for x in shown})) for name in ("batch", "prompt"))
    size = (4 * len(prompts), 3 * len(batches))
    figure, axes = plt.subplots(
        len(batches), len(prompts), figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    places = list(itertools.product(batches, prompts))
    for panel, (batch, prompt) in zip(axes.flat, places, strict=True):
        here = [x for x in shown if (x["batch"], x["prompt"]) == (batch, prompt)]
        for colour, (arm, mine) in enumerate(_grouped(here, "arm")):
            at = [100 * x["share"] for x in mine]
            style = {"color": f"C{colour}"}
            panel.plot(at, [1e3 * x["tpot_s"] for x in mine], label=arm["arm"], marker=".", **style)
            panel.plot(at, [1e3 * x["tpot_p99_s"] for x in mine], ":", linewidth=0.8, **style)
        panel.set(yscale="log", title=f"batch {batch}, prompt {prompt}")
        panel.set(xlabel="memory for experts, % of all dense", ylabel="TPOT ms, predicted")
    axes[0, -1].legend(fontsize="small")
    figure.suptitle("predicted (stated H200 costs), Qwen3-30B-A3B; dotted: p99")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _three(values: Sequence[int]) -> list[int]:
    """The first, the middle and the last."""
    return sorted({values[0], values[len(values) // 2], values[-1]})
