"""moejax with experts in files beside llama.cpp with mmap, both under the same limit of memory.

python -m scripts.disk peer DIR --llama-python PYTHON [--layers 16] [--limit 5GiB] [--rounds 5]

A random OLMoE (13.8 GB in bfloat16, of which experts are 12.9) is written into DIR, converted, and
written as a GGUF file of the same numbers; the first is deleted file by file meanwhile, so that DIR
takes little more than two of them, 28 GB. What is there already is taken as it is. Each engine is
loaded in a process of its own in a memory cgroup with that limit, page cache included. First their
log-probabilities of forced tokens must agree. Then they decode in turn, --tokens further forced
tokens a round of one sequence; before and after each of them some experts' files are read by
nothing but reads past the page cache, since a disk's rate varies by two within minutes.

"compute" is the same step again, when all that it needs is there. "disk" is what a step read, at
the rate of the plain reads around it. Medians of rounds, with quartiles:

  share      of the plain reads' rate, of moejax (bar: 0.9) and of llama.cpp
  step       of moejax, over the larger of compute and disk (bar: 1.20)
  tokens/s   of moejax over llama.cpp's (bar: 1.5, or 0.9 over llama.cpp's share if that is less)

--without-peer leaves llama.cpp out. --delete takes the files away afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoints.convert import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.errors import UserError
from moejax.sizes import parse_size
from scripts.cpu.engines.checkpoint import OLMOE, VARIED, write_checkpoint
from scripts.cpu.engines.compare import AGREEMENT, agreement
from scripts.cpu.engines.llama_files import why_not_llama, write_gguf
from scripts.cpu.engines.protocol import Task, Worker
from scripts.disk.memory_limit import entering, limited, usage
from scripts.disk.plain_reads import read_rate
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

ENGINES = {"moejax": "moejax_engine", "llama.cpp": "llama_engine"}
"""Engine → its worker's module in scripts.cpu.engines."""

CHECKED, CONTEXT, AGAIN = 8, 16, 5
"""Forced tokens whose log-probabilities must agree; tokens before them; times that a step is
repeated for "compute"."""

PLAIN = 96
"""Files of a round of plain reads, at most."""

COLUMNS = [
    ("engine", "{engine}"),
    ("tokens/s", "{tokens_per_s:.2f}"),
    ("ms a token", "{ms:.0f}"),
    ("compute ms", "{compute:.0f}"),
    ("MB a token", "{read:,.0f}"),
    ("MB/s", "{rate:,.0f}"),
    ("plain MB/s", "{plain:,.0f}"),
    ("resident MB, peak", "{resident:,.0f}"),
    ("in the cgroup MB, peak", "{cgroup:,.0f}"),
    ("held back", "{held_back}"),
]


@refusing(RuntimeError, OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    positive(args, "layers", "rounds", "tokens", "readers", "threads")
    if not args.without_peer and (missing := why_not_llama(args.llama_python)):
        raise UserError(f"{missing}, or --without-peer")
    models = files(args, OLMOE | {"num_hidden_layers": args.layers})
    found = measure(args, models)
    if args.delete:
        for path in models.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    show(args.json, [found], report(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, help="where the files are, or will be written")
    add("--llama-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    add("--layers", type=int, default=16, help="of OLMoE's 16 (default: %(default)s)")
    add("--limit", default="5GiB", help="of a process's memory (default: %(default)s)")
    add("--host-memory", default="4.2GiB", help="of moejax (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--tokens", type=int, default=8, help="of a round, an engine (default: %(default)s)")
    add("--readers", type=int, default=4, help="threads of plain reads (default: %(default)s)")
    add("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    add("--transfer-threads", type=int, help="as of moejax")
    add("--no-verify-reads", action="store_true", help="as of moejax")
    add("--without-peer", action="store_true", help="moejax alone")
    add("--delete", action="store_true", help="the files, afterwards")
    add("--json", action="store_true", help="one JSON object instead of the table")
    return parser


# ---- files


def files(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Path]:
    """Engine → what it reads, written where it is not there. Raises UserError, RuntimeError and
    OSError."""
    folder, name = args.directory, f"olmoe-{config['num_hidden_layers']}"
    converted, whole = folder / f"{name}.orbax", folder / f"{name}-BF16.gguf"
    models = {"moejax": converted} | ({} if args.without_peer else {"llama.cpp": whole})
    if not all(path.exists() for path in models.values()):
        source = folder / name
        if not (source / "model.safetensors.index.json").exists():  # written last
            write_checkpoint(source, config, embeddings=VARIED)
        if not converted.exists():
            convert(source, converted)
        if not args.without_peer and not whole.exists():
            write_gguf(args.llama_python, source, whole, "consumed")
        shutil.rmtree(source)
    return models


def forget(path: Path) -> None:
    """No page of these files is left in the page cache, which no cgroup would be charged for."""
    for file in [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on the disk yet stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# ---- engines in turn


def measure(args: argparse.Namespace, models: dict[str, Path]) -> dict[str, Any]:
    """What `report` prints. Raises UserError and RuntimeError."""
    every = [
        path
        for layer in load_checkpoint(models["moejax"], in_files=True).store.files["dense"].paths
        for path in layer
    ]
    steps = CHECKED + args.rounds * args.tokens
    with ExitStack() as stack:
        workers, groups = {}, {}
        for name, model in models.items():
            forget(model)
            groups[name] = stack.enter_context(limited(parse_size(args.limit), name))
            workers[name] = worker = new_worker(args, name, model, steps, groups[name])
            stack.callback(worker.close)
            worker.loaded()
        agreed = agreement(workers, AGREEMENT["bf16"], batch=1, steps=CHECKED)
        rounds = [one_round(args, workers, every, i) for i in range(args.rounds)]
        used = {name: worker.ask("process") for name, worker in workers.items()}
        held = {name: usage(group) for name, group in groups.items()}
    rows = []
    for name, worker in workers.items():
        each = [found[name] for found in rounds]
        middle = {key: float(np.median([r[key] for r in each])) for key in each[0]}
        rows.append(
            {
                "engine": name,
                **middle,
                "tokens_per_s": 1e3 / middle["ms"],
                "resident": used[name]["resident"] / 1e6,
                "cgroup": held[name]["peak"] / 1e6,
                "held_back": held[name]["held_back"],
                "versions": worker.versions,
                "rounds": each,
            }
        )
    return {"agreement": agreed, "rows": rows, "bars": bars(rounds), "verified": verified(args)}


def new_worker(args: argparse.Namespace, name: str, model: Path, steps: int, group: Path) -> Worker:
    task = Task(
        str(model),
        OLMOE["vocab_size"],
        batch=1,
        context=CONTEXT,
        steps=steps,
        prompt=CONTEXT,
        threads=args.threads,
        host_memory=parse_size(args.host_memory) if name == "moejax" else None,
        transfer_threads=args.transfer_threads,
        verify_reads=verified(args),
    )
    python = sys.executable if name == "moejax" else args.llama_python
    module = f"scripts.cpu.engines.{ENGINES[name]}"
    return Worker(name, python, module, task, entering(group))


def verified(args: argparse.Namespace) -> bool:
    return not args.no_verify_reads


def one_round(
    args: argparse.Namespace, workers: dict[str, Worker], every: list[str], number: int
) -> dict[str, dict[str, float]]:
    """Engine → milliseconds, MB and MB/s of a token, of its walk and of plain reads around it."""
    rng, first = np.random.default_rng(number), CHECKED + number * args.tokens

    def plain() -> float:
        picked = rng.choice(len(every), min(PLAIN, len(every)), replace=False)
        return read_rate([every[i] for i in picked], args.readers) / 1e6

    found, before = {}, plain()
    for name, worker in workers.items():
        read = worker.ask("process")["read"]
        seconds = sum(worker.ask("walk", first=first, steps=args.tokens)["seconds"])
        read = (worker.ask("process")["read"] - read) / 1e6
        again = [
            worker.ask("walk", first=first + args.tokens - 1, steps=1)["seconds"][0]
            for _ in range(AGAIN)
        ]
        after = plain()
        found[name] = {
            "ms": seconds / args.tokens * 1e3,
            "compute": float(np.median(again)) * 1e3,
            "read": read / args.tokens,
            "rate": read / seconds,
            "plain": (before + after) / 2,
        }
        before = after
    return found


def bars(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """Ratio → its median and quartiles."""
    ratios: dict[str, list[float]] = {}
    for found in rounds:
        ours = found["moejax"]
        of_round = {f"share, {name}": each["rate"] / each["plain"] for name, each in found.items()}
        disk = ours["read"] / ours["plain"] * 1e3
        of_round["step / max(compute, disk)"] = ours["ms"] / max(ours["compute"], disk)
        if theirs := found.get("llama.cpp"):
            of_round["tokens/s, moejax / llama.cpp"] = theirs["ms"] / ours["ms"]
        for name, value in of_round.items():
            ratios.setdefault(name, []).append(value)
    return {name: np.percentile(each, (50, 25, 75)).tolist() for name, each in ratios.items()}


def report(found: dict[str, Any]) -> list[str]:
    limits = {"share, moejax": (0.9, True), "step / max(compute, disk)": (1.2, False)}
    ratios = found["bars"]
    if theirs := ratios.get("share, llama.cpp"):
        least = min(1.5, 0.9 / theirs[0]) if theirs[0] else 1.5
        limits["tokens/s, moejax / llama.cpp"] = (least, True)
    lines = [*found["agreement"], *aligned(COLUMNS, found["rows"])]
    lines.append(f"checksums {'verified' if found['verified'] else 'NOT verified'}")
    for name, (middle, low, high) in ratios.items():
        said = ""
        if name in limits:
            limit, least = limits[name]
            met = middle >= limit if least else middle <= limit
            said = f"   bar {'≥' if least else '≤'} {limit:.2f}: {'met' if met else 'MISSED'}"
        lines.append(f"{name:<30} {middle:.3f} ({low:.3f} to {high:.3f}){said}")
    lines.append(f"load {os.getloadavg()[0]:.1f}")
    return lines
