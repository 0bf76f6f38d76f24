"""How fast a checkpoint is loaded, beside what the disk and the memory can do, in the same run.

python -m scripts.bench load DIR [--shape olmoe] [--size 2GiB] [--repeats 5] [--json]

Writes a checkpoint of random bfloat16 weights into DIR, once, in shards of half a gigabyte, then
measures by turns, so that all lines see the same machine:

  disk, cold         one thread reads the shards; the page cache was dropped before. Where that is
                     as fast as from the page cache, it could not be dropped
  page cache         the threads that load read the shards, into memory they reuse
  new memory         the same, into memory that nobody has touched: the floor of a warm load
  copy               memory to memory, by the threads that load
  transposing copy   the same, as for a third of the experts' weights
  load, cold         load_checkpoint in the checkpoint's dtype; the page cache was dropped before
  load               the same with the shards in the page cache
  load as float32    with conversion; twice the memory

GB/s are bytes of the checkpoint over the median; CPU seconds (median) are those of all threads, the
kernel's too, which other processes on the machine change less; the last column is the line's time
over the time of the line that it is compared with.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.memory.store import copy_transposed
from host_offload.versions.encoders import WORKERS
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.random_model import SHAPES
from moejax.sizes import parse_size
from scripts.parts.big_checkpoint import checkpoint
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

BLOCK = 8 << 20
"""Bytes read at once by the lines that only read."""

COLUMNS = (
    ("", "{name:<16}"),
    ("seconds", "{seconds:.2f}"),
    ("fastest", "{fastest:.2f}"),
    ("CPU s", "{cpu_seconds:.2f}"),
    ("GB/s", "{gb_per_s:.2f}"),
    ("", "{compared}"),
)


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoint is, or will be written")
    parser.add_argument("--shape", default="olmoe", help=f"{', '.join(SHAPES)} (default: olmoe)")
    parser.add_argument("--size", default="2GiB", help="about; whole layers (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each line (default: 5)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout instead")
    args = parser.parse_args(arguments)
    positive(args, "repeats")
    directory = checkpoint(args.directory, args.shape, parse_size(args.size))
    lines = list(measure(directory, args.repeats))
    about = (
        f"{lines[0]['bytes'] / 1e9:.2f} GB, medians of {args.repeats}, {WORKERS} threads, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    show(args.json, lines, [*aligned(COLUMNS, lines), about])
    return 0


def measure(directory: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """A line for each of the lines in this file's docstring."""
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    reused = [np.zeros(BLOCK, np.uint8) for _ in range(WORKERS)]
    matrix = np.ones((2048, 1024), np.uint16)
    runs: dict[str, tuple[Callable[[], None], str | None]] = {
        "disk, cold": (lambda: read_cold(files), None),
        "page cache": (lambda: read(files, lambda i, n: reused[i][:n]), None),
        "new memory": (lambda: read_new(files, total), None),
        "copy": (lambda: copies(reused[0], np.copyto, total), None),
        "transposing copy": (lambda: copies(matrix, copy_transposed, total), "copy"),
        "load, cold": (lambda: load(directory, "auto"), "disk, cold"),
        "load": (lambda: load(directory, "auto"), "new memory"),
        "load as float32": (lambda: load(directory, "float32"), "new memory"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run, _ in runs.values():  # compiles, and warms the page cache
        run()
    for _ in range(repeats):
        for name, (run, _) in runs.items():
            touch(2 * total)
            if "cold" in name:
                drop_cache(files)
            began, busy = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - busy)
            if "cold" in name:
                read(files, lambda i, n: reused[i][:n])
    for name, (_, other) in runs.items():
        median = float(np.median(seconds[name]))
        ratio = None if other is None else median / float(np.median(seconds[other]))
        yield {
            "name": name,
            "seconds": median,
            "fastest": min(seconds[name]),
            "cpu_seconds": float(np.median(cpu_seconds[name])),
            "gb_per_s": total / median / 1e9,
            "bytes": total,
            "ratio": ratio,
            "compared": "" if other is None else f"{ratio:.2f} × {other}",
        }


def touch(nbytes: int) -> None:
    """Has the machine give this process so much memory, and frees it: the next line's memory is
    new to the process but, where this is a virtual machine, not to its host."""
    np.empty(nbytes, np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 1


def drop_cache(files: Sequence[Path]) -> None:
    """Takes the files out of the page cache, as far as the system heeds the advice."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(files: Sequence[Path]) -> None:
    buffer = np.empty(BLOCK, np.uint8)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer.data):
                pass


def read(files: Sequence[Path], memory: Callable[[int, int], np.ndarray]) -> None:
    """Reads all files with WORKERS threads. memory: (thread, bytes) → where to."""
    pieces = [
        (file, offset, min(BLOCK, file.stat().st_size - offset))
        for file in files
        for offset in range(0, file.stat().st_size, BLOCK)
    ]

    def work(thread: int) -> None:
        for file, offset, nbytes in pieces[thread::WORKERS]:
            descriptor = os.open(file, os.O_RDONLY)
            os.preadv(descriptor, [memory(thread, nbytes).data], offset)
            os.close(descriptor)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))


def read_new(files: Sequence[Path], total: int) -> None:
    memory = np.empty(total + WORKERS * BLOCK, np.uint8)
    places = [thread * (total // WORKERS + BLOCK) for thread in range(WORKERS)]

    def take(thread: int, nbytes: int) -> np.ndarray:
        places[thread] += nbytes
        return memory[places[thread] - nbytes : places[thread]]

    read(files, take)


def copies(source: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], None], total: int) -> None:
    """Copies `total` bytes, piece by piece, with WORKERS threads."""
    shape = source.T.shape if copy is copy_transposed else source.shape

    def work(thread: int) -> None:
        out = np.empty(shape, source.dtype)
        for _ in range(total // source.nbytes // WORKERS):
            copy(out, source)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))


def load(directory: Path, dtype: str) -> None:
    load_checkpoint(directory, dtype).store.delete()
