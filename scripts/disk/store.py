"""A model whose experts stay in files, under a limit of memory that holds not half of it.

python -m scripts.disk store DIR [--shape olmoe] [--layers N] [--limit 5GiB] [--budgets 4GiB,2GiB]

Writes a converted checkpoint of random bfloat16 weights into DIR, once, and runs it with
store="file" and each --host-memory of --budgets, each in a process of its own in a memory cgroup
with that limit, page cache included. A process generates greedily for the same prompts; between
rounds it reads some of the experts' files by nothing but reads, since a disk's rate
varies by two within minutes. The table has the resident set, what the cgroup counted, the bytes
read and their rate, and its share of the plain reads' rate beside (median of the rounds, and its
quartiles). The exit status is 1 where two budgets give other tokens or log-probabilities.

With --kill a further process is killed (SIGKILL) while it reads experts, which must leave every
file as it was, and another one that starts after it must give the same bits: there is nothing to
repair.

--delete takes the checkpoint away afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.random_model import SHAPES
from moejax.sizes import parse_size
from scripts.cpu.engines.protocol import disk_bytes, peak_resident
from scripts.disk.memory_limit import entering, limited, run, usage
from scripts.disk.plain_reads import read_rate
from scripts.disk.random_converted import converted
from scripts.parts.commands import new_parser, refusing
from scripts.parts.text_table import aligned

READING = "reading experts"
"""What a process says before each round."""

PLAIN = 128
"""The most files of a round of plain reads."""

COLUMNS = [
    ("host memory", "{budget}"),
    ("cells a layer", "{cells}"),
    ("resident MB, peak", "{resident:,.0f}"),
    ("in the cgroup MB, peak", "{cgroup:,.0f}"),
    ("start s", "{start:.1f}"),
    ("ms a token", "{step:.0f}"),
    ("hit rate", "{hits:.2f}"),
    ("MB a token", "{read:,.0f}"),
    ("MB/s", "{rate:,.0f}"),
    ("plain MB/s", "{plain:,.0f}"),
    ("share", "{share:.2f} ({low:.2f} to {high:.2f})"),
    ("bits", "{bits}"),
]


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, help="where the checkpoint is, or will be written")
    add("--shape", default="olmoe", help=f"{', '.join(SHAPES)} (default: olmoe)")
    add("--layers", type=int, help="fewer than the model has")
    add("--limit", default="5GiB", help="of a process's memory (default: %(default)s)")
    add("--budgets", default="4GiB,2GiB", help="--host-memory of moejax (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences at once (default: %(default)s)")
    add("--tokens", type=int, default=4, help="of each a round (default: %(default)s)")
    add("--prompt", type=int, default=4, help="tokens of a prompt (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--readers", type=int, default=2, help="threads of plain reads (default: %(default)s)")
    add("--no-verify-reads", action="store_true", help="as of moejax")
    add("--options", default="{}", help="more options of moejax.LLM, a JSON object")
    add("--kill", action="store_true", help="one process, and start another")
    add("--delete", action="store_true", help="the checkpoint, afterwards")
    add("--json", action="store_true", help="one JSON object a line instead of the table")
    add("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        print(json.dumps(measured(args, parse_size(args.child))))
        return 0
    directory = converted(args.directory, args.shape, args.layers)
    rows = []
    for budget in args.budgets.split(","):
        rows.append(row(args, directory, budget))
        if args.json:
            print(json.dumps(rows[-1]), flush=True)
    if args.kill:
        budget = args.budgets.split(",")[0]
        kill_one(args, directory, budget)
        rows.append(row(args, directory, budget) | {"budget": f"{budget}, after a kill"})
        if args.json:
            print(json.dumps(rows[-1]), flush=True)
    if args.delete:
        shutil.rmtree(directory)
    if not args.json:
        print("\n".join(aligned(COLUMNS, rows)))
        print(f"{rows[0]['files'] / 1e9:.1f} GB of experts in files; load {os.getloadavg()[0]:.1f}")
    return 0 if len({row["bits"] for row in rows}) == 1 else 1


def child(args: argparse.Namespace, directory: Path, budget: str) -> list[str]:
    """The command of a process that is to run under the limit."""
    command = [sys.executable, "-m", "scripts.disk", "store", str(directory), "--child", budget]
    for name in ("batch", "tokens", "prompt", "rounds", "readers", "options"):
        command += [f"--{name}", str(getattr(args, name))]
    return command + (["--no-verify-reads"] if args.no_verify_reads else [])


def kill_one(args: argparse.Namespace, directory: Path, budget: str) -> None:
    """Ends a process by SIGKILL while it reads experts. Raises UserError where it ended before, or
    left a file other than it was."""
    before = listing(directory)
    with limited(parse_size(args.limit)) as group:
        process = subprocess.Popen(
            [*entering(group), *child(args, directory, budget)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()  # READING
            began = disk_bytes(process.pid)
            while process.poll() is None and disk_bytes(process.pid) == began:
                time.sleep(0.001)
            process.kill()
        if process.wait() != -signal.SIGKILL:
            raise UserError(f"the process to be killed ended before, with {process.returncode}")
    if listing(directory) != before:
        raise UserError(f"{directory}: files changed while a process was killed that read them")


def listing(directory: Path) -> dict[Path, tuple[int, int]]:
    """File → its size and when it was written."""
    found = ((path, path.stat()) for path in directory.rglob("*") if path.is_file())
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found}


def row(args: argparse.Namespace, directory: Path, budget: str) -> dict[str, Any]:
    """A line of the table: one process. Raises UserError where it fails."""
    with limited(parse_size(args.limit)) as group:
        found = json.loads(run(group, child(args, directory, budget)).splitlines()[-1])
        held = usage(group)
    shares = [r["rate"] / r["plain"] for r in found["rounds"]]
    low, middle, high = np.quantile(shares, [0.25, 0.5, 0.75])
    means = {
        name: statistics.median(r[name] for r in found["rounds"])
        for name in ("rate", "plain", "read", "step")
    }
    return {
        **found,
        **means,
        **dict(budget=budget, low=low, share=middle, high=high),
        "cgroup": held["peak"] / 1e6,
        "held_back": held["held_back"],
    }


def measured(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    """What a process finds that runs under the limit."""
    began, batch, tokens = time.perf_counter(), args.batch, args.tokens
    limits = dict(max_num_seqs=batch, max_model_len=256, max_num_batched_tokens=256)
    options = dict(store="file", host_memory=budget, verify_reads=not args.no_verify_reads)
    options |= json.loads(args.options)
    rng, bits, rounds = np.random.default_rng(0), hashlib.sha256(), []
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(args.directory, device="cpu", progress=False, **limits, **options) as llm:
        llm.engine.runner.wait_compiled(everything=True)
        start = time.perf_counter() - began
        files = llm.engine.runner.store.files["dense"].paths
        every = [path for layer in files for path in layer]
        each = llm.engine.runner.store.file_bytes / len(every)
        vocabulary, count = llm.engine.runner.config.vocab_size, 16
        for _ in range(args.rounds + 1):
            prompts = rng.integers(vocabulary, size=(batch, args.prompt)).tolist()
            picked = rng.choice(len(every), min(count, len(every)), replace=False)
            plain = read_rate([every[i] for i in picked], args.readers)
            print(READING, flush=True)
            before, clock = disk_bytes(), time.perf_counter()
            found = llm.generate(prompts, params)
            seconds, read = time.perf_counter() - clock, disk_bytes() - before
            for request in found:
                bits.update(str([(o.token_ids, o.logprobs) for o in request.outputs]).encode())
            count = int(np.clip(read / each, 16, PLAIN))
            rounds.append(
                {
                    "plain": plain / 1e6,
                    "rate": read / seconds / 1e6,
                    "read": read / tokens / 1e6,
                    "step": seconds / tokens * 1e3,
                }
            )
        faults, stats = llm.engine.runner.faults(), llm.stats()
        if faults:
            raise UserError(f"broken invariants: {faults}")
        return {
            "files": llm.engine.runner.store.file_bytes,
            "cells": "/".join(map(str, sorted(set(llm.plan.cells)))),
            "resident": peak_resident() / 1e6,
            "start": start,
            "hits": stats["experts"]["hit_rate"],
            "rounds": rounds[1:],
            "bits": bits.hexdigest()[:12],
        }
