"""WiSP's claim that prefetch by co-activation hides misses, in time: on and off, over links.

python -m scripts.transfers claim OUT [--links 250MB/s,1GB/s,4GB/s] [--budgets 25%,75%]
                                  [--batch 1,8,32] [--repeats 6] [--output-tokens 64]
                                  [--model demo] [--expert-width N]

A grid of `moejax ablate` (docs/ablation.md) in OUT on the host driver: LRU alone (off), with
prefetch="coactivation" (on; fitted to prompts of the texts' first 60%), and with a policy that
looks where co-activation does and prefetches nothing (looks) × links × budgets × batches, with
transfers beside compute over a link of that rate (docs/transfers.md). Policies take turns within
each repeat, each run begins cold. Beside what was measured stands what the timeline predicts here,
by costs that are measured first, for each batch, where there are none; and, predicted alone, a link
with a GPU's ratio: --gpu-ratio (60, HBM to PCIe) times slower than this machine copies memory.

--expert-width pads the experts with zeros: routing and outputs are the model's own, products and
transfers those of larger experts, as the Python between a small model's layers would drown them.

Ratios are those to off in the same repeat, medians with their 95% interval where there are 6
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
from moejax.serve.costs import cost_model_of
from moejax.sizes import parse_rate
from scripts.parts.commands import new_parser, refusing
from scripts.parts.padded_experts import padded_experts
from scripts.parts.text_table import aligned

OFF, ON = "lru", "lru + coactivation=train"
LOOKS = f"lru + {Path(__file__).with_name('onlooker.py')}:Onlooker"

COLUMNS = (
    ("link", "{link}"),
    ("mode", "{mode}"),
    ("budget", "{budget}"),
    ("batch", "{batch}"),
    ("tokens/s off", "{off:.1f}"),
    ("looks / off", "{looks_tokens_per_s}"),
    ("on / off", "{tokens_per_s}"),
    ("first token off, ms", "{first:.1f}"),
    ("looks / off", "{looks_ttft_s}"),
    ("on / off", "{ttft_s}"),
    ("misses on / off", "{misses:.2f}"),
    ("bytes on / off", "{bytes:.2f}"),
)


@refusing(ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("out", type=Path, help="directory of the results")
    add("--model", default="demo", help="(default: %(default)s)")
    add("--expert-width", type=int, help="pad the experts to it (default: as they are)")
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
    lines = list(table(args))
    text = "\n".join(map(json.dumps, lines)) if args.json else "\n".join(aligned(COLUMNS, lines))
    (args.out / "claim.md").write_text(f"```\n{text}\n```\n")
    print(text)
    return 0


def table(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    links = args.links.split(",")
    for link in links:
        parse_rate(link)
    if args.expert_width is not None:
        args.model = str(padded_experts(args.model, args.expert_width, args.out / "model"))
    modes = ["measured"] if args.measured_only else ["measured", "predicted"]
    if not args.measured_only:
        for batch in args.batch.split(","):
            cost_model_of(
                args.model,
                driver="host",
                max_num_seqs=int(batch),
                max_model_len=-(-(args.prompt_tokens + args.output_tokens) // 64) * 64,
            )
    yield from compared(args, args.out / "grid", links, modes)
    if args.gpu_ratio and not args.measured_only:
        rate = f"{max(copy_rate(args.out) / args.gpu_ratio / 1e6, 1):.0f}MB/s"
        for line in compared(args, args.out / "gpu-ratio", [rate], ["predicted"]):
            yield {**line, "link": f"{rate} (a GPU's ratio)"}


def compared(
    args: argparse.Namespace, directory: Path, links: Sequence[str], modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A line for each cell with prefetch, compared with those without."""
    definition = {
        "model": args.model,
        "policies": [OFF, LOOKS, ON],
        "driver": "host",
        "budgets": args.budgets.split(","),
        "batch": [int(n) for n in args.batch.split(",")],
        "prompt_tokens": [args.prompt_tokens],
        "output_tokens": args.output_tokens,
        "modes": list(modes),
        "repeats": args.repeats,
        "link_rate": list(links),
    }
    rows = ablate(definition, directory, progress=not args.json).summary()
    place = ("link_rate", "mode", "budget", "batch")
    cells = {(row["policy"], *(row[key] for key in place)): row for row in rows}
    for (policy, *where), on in cells.items():
        if policy != ON:
            continue
        off, looks = (cells[other, *where] for other in (OFF, LOOKS))
        for each in (off, looks, on):
            if each["error"]:
                raise UserError(f"{directory}: {each['policy']}: {each['error']}")
        times = ("tokens_per_s", "ttft_s")
        yield {
            "link": on["link_rate"],
            **{key: on[key] for key in place[1:]},
            "off": off["tokens_per_s"],
            "first": off["ttft_s"] * 1e3,
            **{key: ratio(on, off, key) for key in times},
            **{f"looks_{key}": ratio(looks, off, key) for key in times},
            "misses": on["decode_misses"] / max(off["decode_misses"], 1),
            "bytes": on["decode_bytes"] / max(off["decode_bytes"], 1),
        }


def ratio(row: dict[str, Any], off: dict[str, Any], key: str) -> str:
    """Median of the pairs' ratios with its interval, where there is one."""
    value = row.get(f"{key}_ratio", row[key] / off[key])
    low, high = (row.get(f"{key}_ratio_{end}") for end in ("low", "high"))
    return f"{value:.3f}" + ("" if low is None else f" ({low:.3f} … {high:.3f})")


def copy_rate(out: Path) -> float:
    """Bytes a second that this machine copies from memory to memory; measured once for OUT, since
    the grid's definition has the link's rate."""
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
