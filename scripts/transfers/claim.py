"""WiSP's claim that prefetch by co-activation hides misses, in time: on and off, over links.

python -m scripts.transfers claim OUT [--links 250MB/s,1GB/s,4GB/s] [--budgets 25%,75%]
                                  [--batch 1,8,32] [--repeats 6] [--output-tokens 64]

For each link rate a grid of `moejax ablate` (docs/ablation.md) in OUT: LRU with and without
prefetch="coactivation" on the host driver × budgets × batches, with transfers beside compute over a
link of that rate (docs/transfers.md). Policies take turns within each repeat, each run begins cold.
Beside what was measured stands what the timeline predicts here, by what `moejax calibrate
MODEL --driver host --max-num-seqs 32` measured before, and, predicted alone, a link with a GPU's
ratio: --gpu-ratio (60, HBM to PCIe) times slower than this machine copies memory.

Ratios are prefetch / none in the same repeat, medians with their 95% interval where there are 6
repeats: above 1 prefetch helps throughput, below 1 it helps the time to first token. The same
command goes on after a kill. The table is written to OUT/claim.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import UserError
from moejax.evaluate.experiments.grid import ablate
from moejax.sizes import parse_rate
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

OFF, ON = "lru", "lru + coactivation"

COLUMNS = (
    ("link", "{link}"),
    ("mode", "{mode}"),
    ("budget", "{budget}"),
    ("batch", "{batch}"),
    ("tokens/s off", "{off:.1f}"),
    ("on / off", "{tokens_per_s}"),
    ("first token off, ms", "{first:.1f}"),
    ("on / off", "{ttft_s}"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("out", type=Path, help="directory of the results")
    add("--model", default="demo", help="(default: %(default)s)")
    add("--links", default="250MB/s,1GB/s,4GB/s", help="rates (default: %(default)s)")
    add("--budgets", default="25%,75%", help="of experts (default: 25%%,75%%)")
    add("--batch", default="1,8,32", help="prompts at once (default: %(default)s)")
    add("--prompt-tokens", type=int, default=64, help="(default: %(default)s)")
    add("--output-tokens", type=int, default=64, help="of each prompt (default: %(default)s)")
    add("--repeats", type=int, default=6, help="of each cell (default: %(default)s)")
    add("--gpu-ratio", type=float, default=60, help="0: leave it out (default: %(default)s)")
    add("--measured-only", action="store_true", help="predict nothing")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    try:
        lines = list(table(args))
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    text = "\n".join(map(json.dumps, lines)) if args.json else "\n".join(aligned(COLUMNS, lines))
    (args.out / "claim.md").write_text(f"```\n{text}\n```\n")
    print(text)
    return 0


def table(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    modes = ["measured"] if args.measured_only else ["measured", "predicted"]
    for link in args.links.split(","):
        parse_rate(link)
        yield from compared(args, link, link, modes)
    if args.gpu_ratio and not args.measured_only:
        rate = f"{max(copy_rate(args.out) / args.gpu_ratio / 1e6, 1):.0f}MB/s"
        yield from compared(args, f"{rate} (a GPU's ratio)", rate, ["predicted"])


def compared(
    args: argparse.Namespace, name: str, link: str, modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A line for each cell with prefetch, compared with the one without."""
    definition = {
        "model": args.model,
        "policies": [OFF, ON],
        "driver": "host",
        "budgets": args.budgets.split(","),
        "batch": [int(n) for n in args.batch.split(",")],
        "prompt_tokens": [args.prompt_tokens],
        "output_tokens": args.output_tokens,
        "modes": list(modes),
        "repeats": args.repeats,
        "link_rate": [link],
    }
    directory = args.out / f"link-{link.replace('/', '-per-')}-{'-'.join(modes)}"
    rows = ablate(definition, directory, progress=not args.json).summary()
    place = ("mode", "budget", "batch")
    without = {tuple(r[k] for k in place): r for r in rows if r["policy"] == OFF}
    for row in rows:
        if row["policy"] != ON:
            continue
        off = without[tuple(row[key] for key in place)]
        for each in (off, row):
            if each["error"]:
                raise UserError(f"{directory}: {each['policy']}: {each['error']}")
        yield {
            "link": name,
            **{key: row[key] for key in place},
            "off": off["tokens_per_s"],
            "first": off["ttft_s"] * 1e3,
            **{key: ratio(row, off, key) for key in ("tokens_per_s", "ttft_s")},
        }


def ratio(row: dict[str, Any], off: dict[str, Any], key: str) -> str:
    """Median of the pairs' ratios with its interval, where there is one."""
    value = row.get(f"{key}_ratio", row[key] / off[key])
    low, high = (row.get(f"{key}_ratio_{end}") for end in ("low", "high"))
    return f"{value:.3f}" + ("" if low is None else f" ({low:.3f} … {high:.3f})")


def copy_rate(out: Path) -> float:
    """Bytes a second that this machine copies from memory to memory; measured once for OUT, since
    the grid's name has the link's rate."""
    kept = out / "copy-rate.json"
    if kept.exists():
        return float(json.loads(kept.read_text()))
    source = np.ones(1 << 28, np.uint8)
    target, rates = np.zeros_like(source), []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        rates.append(source.nbytes / (time.perf_counter() - began))
    out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(statistics.median(rates)))
    return statistics.median(rates)
