"""Brings a model's files into the page cache while jax is imported and started.

Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from host_offload.memory.device_memory import host_available_bytes

_AT_ONCE, _THREADS = 8 << 20, 4
"""Bytes that a thread asks for at once, and threads. A disk gives a third more to four such
requests than to one, and gives first what was asked for first."""
_BLOCK = 1 << 20
"""Bytes of a file that are asked for early or late as a whole."""
_go = threading.Event()
_go.set()
_MOST_HEADER = 16 << 20
"""Bytes of a header that is read here. Files with a larger one are read in their order."""


@functools.cache
def read_ahead(model: str) -> None:
    """Begins to read, in a thread, the files of a local checkpoint of which the memory that this
    process can take holds two copies. An error is not told: loading meets it too.

    - `model`: a directory with safetensors files, or a GGUF file; nothing is read of another.
    """
    if hasattr(os, "posix_fadvise"):
        _daemon(_begin, model)


def pause_reading_ahead(pause: bool) -> None:
    """Leaves the disk to the reads of others until it is called with False."""
    (_go.clear if pause else _go.set)()


def _daemon(function: Callable[..., None], *args: Any) -> None:
    # Nothing ends a request to a disk that does not answer, not even the end of the process.
    threading.Thread(target=function, args=args, name="moejax-ahead", daemon=True).start()


def _begin(model: str) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # also of a path that is none
        path = Path(model).expanduser()
        files = [path] if path.suffix == ".gguf" else sorted(path.glob("model*.safetensors"))
        sizes = {file: file.stat().st_size for file in files}
        if 2 * sum(sizes.values()) > host_available_bytes():
            return
        # Many headers are read in one wait for a disk, not each in its own.
        _advise(iter([(file, 0, _BLOCK, True) for file in files]))
        found = [(file, *piece) for file in files for piece in _pieces(file, sizes[file])]
        pieces = iter(sorted(found, key=lambda piece: not piece[-1]))  # early ones first
        for _ in range(_THREADS):
            _daemon(_advise, pieces)


def _pieces(file: Path, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yields (first byte, bytes, early) of pieces that a file consists of after its first block.
    The pieces with its header, and with weights that are no expert's, are early: a start goes on
    when it has these, and waits for experts last."""
    first, count = 1, -(-size // _BLOCK)
    early = _early_blocks(file, size)
    for block in range(2, count + 1):
        alike = block < count and (block in early) == (first in early)
        if not alike or (block - first) * _BLOCK == _AT_ONCE:
            yield first * _BLOCK, (block - first) * _BLOCK, first in early
            first = block


def _early_blocks(file: Path, size: int) -> set[int]:
    """The blocks of a safetensors file that hold its header, or tensors of no expert. None of a
    damaged one, which loading refuses."""
    found: set[int] = set()
    if file.suffix != ".safetensors" or not size:
        return found
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length <= min(size, _MOST_HEADER) else b"{}"
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        spans = [
            entry["data_offsets"]
            for name, entry in json.loads(text).items()
            if name != "__metadata__" and ".experts." not in name
        ]
        for begin, end in [(-8 - length, 0), *spans]:
            first, last = max(8 + length + begin, 0), min(8 + length + end, size)
            found.update(range(first // _BLOCK, -(-last // _BLOCK)))
    return found


def _advise(pieces: Iterator[tuple[Path, int, int, bool]]) -> None:
    """Asks for the pieces that no other thread has taken."""
    with contextlib.suppress(OSError):
        for file, begin, count, _ in pieces:
            _go.wait()
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
