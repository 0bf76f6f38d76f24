"""The resident set of a process that loads a checkpoint and serves it, beside weights and KV.

python -m scripts.cpu memory DIR [--shape olmoe] [--size 4GiB] [--eviction lru] [--ops auto]

Writes a checkpoint of random bfloat16 weights into DIR, once, and starts a process of its own that
loads it, runs a prefill and some decode steps, and reads its own resident set from /proc: when jax
runs and no weight is read, the peak of the start (loading, arena, compilation), after it, the peak
of the steps, and after them. The bound is of issue 20: 1.15 × weights + KV, everything included,
python, jax and what it compiles too. The exit status is 1 where the last line is beyond the bound.
With --eviction experts get cells beside the store, two copies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax import LLM, SamplingParams, UserError
from moejax.device import select_device
from scripts.cpu.big_checkpoint import add_checkpoint, checkpoint_of
from scripts.parts.commands import new_parser, refusing
from scripts.parts.text_table import aligned

SHARE = 1.15
"""Share of the weights that may be resident, beside KV."""

STATUS = Path("/proc/self/status")

COLUMNS = [
    ("", "{when}"),
    ("resident MB", "{mb:,.0f}"),
    ("of weights + KV", "{share:.3f}"),
    ("without the process before", "{own:.3f}"),
]


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add_checkpoint(parser, "4GiB")
    parser.add_argument("--tokens", type=int, default=16, help="to generate (default: 16)")
    for name in ("eviction", "ops", "dtype"):
        parser.add_argument(f"--{name}", help="as of moejax")
    parser.add_argument("--json", action="store_true", help="one JSON object instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    options = {n: v for n in ("eviction", "ops", "dtype") if (v := getattr(args, n)) is not None}
    if args.child:
        print(json.dumps(measured(args.directory, args.tokens, options)))
        return 0
    if args.tokens < 2:
        raise UserError("--tokens must be at least 2")
    if not STATUS.exists():
        raise UserError(f"{STATUS} is not there; this reads Linux's")
    directory = checkpoint_of(args)
    found = in_process(directory, args.tokens, options)
    lines = table(found)
    if args.json:
        print(json.dumps({**found, "lines": lines}))
    else:
        print("\n".join(aligned(COLUMNS, lines)))
        bound = SHARE * found["weights"] + found["kv"]
        print(
            f"weights {found['weights'] / 1e6:,.0f} MB, KV {found['kv'] / 1e6:,.0f} MB, "
            f"{SHARE} × weights + KV {bound / 1e6:,.0f} MB; "
            f"{found['in_place']} experts in place; load {os.getloadavg()[0]:.1f}"
        )
    return 0 if found["rss"]["after steps"] <= SHARE * found["weights"] + found["kv"] else 1


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    whole, before = found["weights"] + found["kv"], found["rss"]["before"]
    return [
        {"when": when, "mb": rss / 1e6, "share": rss / whole, "own": (rss - before) / whole}
        for when, rss in found["rss"].items()
    ]


def in_process(directory: Path, tokens: int, options: dict[str, str]) -> dict[str, Any]:
    """`measured` in a fresh process. Raises UserError with the end of what it wrote where it
    fails."""
    command = [sys.executable, "-m", "scripts.cpu", "memory", str(directory), "--child"]
    command += ["--tokens", str(tokens)]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the process failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(directory: Path, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights, of KV, and of this process's resident set when it does what."""
    select_device("cpu").memory_stats()  # jax runs
    rss = {"before": status("VmRSS")}
    limits = dict(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=512)
    with LLM(directory, device="cpu", progress=False, **limits, **options) as llm:
        llm.engine.runner.wait_compiled(everything=True)
        rss |= {"start, peak": status("VmHWM"), "after start": status("VmRSS")}
        reset_peak()
        vocabulary = llm.engine.runner.config.vocab_size
        prompts = np.random.default_rng(0).integers(vocabulary, size=(4, 64)).tolist()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        rss |= {"steps, peak": status("VmHWM"), "after steps": status("VmRSS")}
        stats, params = llm.stats(), llm.engine.runner.state
        dense = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        kv = stats["arena"]["kv_slots"] * stats["arena"]["slot_bytes"]
        return {
            "weights": stats["store_bytes"] + dense,
            "kv": kv,
            "arena": stats["arena"]["bytes"],
            "in_place": stats["experts_in_place"],
            "rss": rss,
        }


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """VmHWM begins again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
