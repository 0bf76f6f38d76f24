"""FluxMoE's Exp#3 as a race: experts released by the live planner while contexts grow.

python -m scripts.bench planner [--model DIR] [--link-rate 200MB/s]

The same requests run at the same memory, by turns with planner=none (the paper's fixed share: KV
that does not fit waits), planner=live (one expert of every layer a move) and planner=one-layer (as
many of one layer, the paper's arm without I/O balance). A ratio is to the fixed share, the median
over the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from moejax import LLM, SamplingParams
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

ARMS = ("none", "live", "one-layer")

COLUMNS = (
    ("planner", "{planner}"),
    ("tok/s", "{rate:.1f}"),
    ("/ none", "{ratio:.2f} [{least:.2f}, {most:.2f}]"),
    ("moves", "{moves}"),
    ("experts released", "{released}"),
    ("preempted", "{preempted}"),
    ("slowest layer / mean", "{skew:.2f}"),
)


def run(args: argparse.Namespace, planner: str) -> dict[str, float]:
    """Runs the requests once. Returns tokens a second and what the planner did."""
    driver = f"stream,tiers=flux,packed={args.packed},planner={planner}"
    if planner != "none":
        driver += f",interval={args.interval}"
    limits = {
        "max_num_seqs": args.requests,
        "max_model_len": args.prompt + args.tokens,
        "enable_prefix_caching": False,
        "progress": False,
        "device": "cpu",
    }
    transfers = f"queue,rate={args.link_rate},latency=20us"
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, args.prompt).tolist() for _ in range(args.requests)]
    with LLM(args.model, driver=driver, memory=args.memory, transfers=transfers, **limits) as llm:
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate(prompts[:1], short, use_tqdm=False)  # compiles
        window = llm.engine.runner.window
        assert window is not None
        layers, began = len(window.placement), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        took, stats = time.perf_counter() - began, llm.stats()
    moves = (stats.get("planner") or {}).get("moves", [])
    host = int(window.placement[:, 2].sum())
    most = max((move["host"] for move in moves), default=host)
    loads = [np.array(move["by_layer"]) for move in moves] or [window.placement[:, 2]]
    skew = max(float(each.max() / max(each.mean(), 1e-9)) for each in loads)
    return {
        "rate": args.requests * args.tokens / took,
        "moves": len(moves),
        "released": most - host,
        "preempted": stats["kv"]["preemptions"],
        "skew": skew,
        "layers": layers,
    }


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default="demo", help="the model (default: %(default)s)")
    add("--link-rate", default="200MB/s", help="rate of the stated link (default: %(default)s)")
    add("--memory", default="8MiB", help="experts and KV together (default: %(default)s)")
    add("--packed", default="75%", help="share that begins packed (default: %(default)s)")
    add("--requests", type=int, default=8, help="requests at once (default: %(default)s)")
    add("--prompt", type=int, default=32, help="tokens of a prompt (default: %(default)s)")
    add("--tokens", type=int, default=224, help="tokens of an answer (default: %(default)s)")
    add("--interval", type=int, default=300, help="steps between moves (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "requests", "prompt", "tokens", "interval", "rounds")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for turn in range(args.rounds):
        for arm in ARMS[:: 1 if turn % 2 == 0 else -1]:
            found[arm].append(run(args, arm))
    base = np.array([each["rate"] for each in found["none"]])
    rows = []
    for arm, runs in found.items():
        rate = np.array([each["rate"] for each in runs])
        ratio = rate / base
        row = {**runs[-1], "planner": arm, "rate": float(np.median(rate))}
        row |= {"ratio": float(np.median(ratio)), "least": float(ratio.min())}
        rows.append(row | {"most": float(ratio.max())})
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0
