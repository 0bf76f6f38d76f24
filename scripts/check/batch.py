"""File jobs with the embedded model: killed and resumed, and with memory watched.

    python -m scripts.check batch [--kills 20] [--prompts 1000] [--seed 0]

1. A job of plain and OpenAI lines, some of them bad, runs undisturbed. The same job is then ended
   with SIGKILL at random points, resumed each time, and at last let run: its results, sorted by id
   and without `metrics`, must be the undisturbed ones, byte for byte.
2. A job of --prompts lines runs while its resident memory is sampled (Linux). The medians of the
   first and the last quarter of the time with results are printed; they may differ by 16 MiB.

Exits with status 1 if one of them fails. --kills 0 or --prompts 0 leaves its part out.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.parts.commands import new_parser
from scripts.parts.file_jobs import command, results, run, write_input

TOLERANCE_BYTES = 16 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def kill_at(arguments: Sequence[str], output: Path, size: int, delay_s: float) -> int:
    """Ends a job with SIGKILL delay_s after its output has so many bytes; returns the output's
    bytes then. Raises RuntimeError if the job ends by itself."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not output.exists() or output.stat().st_size < size:
            if process.poll() is not None:
                assert process.stderr is not None
                raise RuntimeError(f"it ended before the kill\n{process.stderr.read().decode()}")
            time.sleep(0.001)
        time.sleep(delay_s)
    finally:
        process.kill()
        process.communicate()
    return output.stat().st_size


def kill_often(source: Path, output: Path, whole: int, kills: int, seed: int) -> list[int]:
    """Resumes a job and kills it, again and again, at random sizes of its output. whole: bytes of
    all results. Returns the sizes at which it was killed."""
    draw, sizes = random.Random(seed), []
    # Not in the last tenth: a job that has ended cannot be killed.
    points = sorted(int(draw.uniform(0, 0.9) * whole) for _ in range(kills))
    for point in points:
        sizes.append(kill_at(command(source, output), output, point, draw.uniform(0, 0.02)))
    return sizes


def check_kills(directory: Path, kills: int, seed: int) -> bool:
    source = directory / "input.jsonl"
    write_input(source, max(200, 20 * kills), seed)
    run(command(source, directory / "undisturbed.jsonl"))
    undisturbed = results(directory / "undisturbed.jsonl")
    whole = (directory / "undisturbed.jsonl").stat().st_size
    sizes = kill_often(source, directory / "killed.jsonl", whole, kills, seed)
    run(command(source, directory / "killed.jsonl"))
    same = results(directory / "killed.jsonl") == undisturbed
    shares = ", ".join(f"{100 * size / whole:.0f}%" for size in sizes)
    print(f"{len(undisturbed)} results, {kills} kills with the output at {shares}")
    print("equal to the undisturbed run" if same else "✗ NOT equal to the undisturbed run")
    return same


def check_memory(directory: Path, prompts: int, seed: int) -> bool:
    source, output = directory / "prompts.jsonl", directory / "memory.jsonl"
    write_input(source, prompts, seed, bad=False)
    process = subprocess.Popen(command(source, output))
    samples, first = [], None
    while process.poll() is None:
        if output.exists() and output.stat().st_size:
            first = first or time.perf_counter()
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            samples.append(pages * PAGE_BYTES)
        time.sleep(0.02)
    seconds = time.perf_counter() - (first or 0)
    lines = len(results(output))
    quarter = len(samples) // 4
    begin, end = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
    flat = process.returncode == 0 and lines == prompts and end - begin <= TOLERANCE_BYTES
    print(
        f"{lines} results of {prompts} prompts in {seconds:.1f} s; resident memory, median of the "
        f"first quarter {begin / 2**20:.1f} MiB, of the last {end / 2**20:.1f} MiB, "
        f"most {max(samples) / 2**20:.1f} MiB ({len(samples)} samples)"
    )
    print("flat" if flat else "✗ NOT flat, or the job failed")
    return flat


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--kills", type=int, default=20, help="default: 20")
    parser.add_argument("--prompts", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and kills (default: 0)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory, good = Path(name), True
        if args.kills:
            good &= check_kills(directory, args.kills, args.seed)
        if args.prompts:
            good &= check_memory(directory, args.prompts, args.seed)
    return 0 if good else 1
