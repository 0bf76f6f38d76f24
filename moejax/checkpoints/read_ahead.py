"""Brings a model's files into the page cache while jax is imported and started.

Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from host_offload.memory.device_memory import host_available_bytes

_AT_ONCE, _THREADS = 8 << 20, 4
"""Bytes that a thread asks for at once, and threads. A disk gives a third more to four such
requests than to one, and gives first what was asked for first."""


@functools.cache
def read_ahead(model: str) -> None:
    """Begins to read, in a thread, the files of a local checkpoint of which the memory that this
    process can take holds two copies. An error is not told: loading meets it too.

    - `model`: a directory with safetensors files, or a GGUF file; nothing is read of another.
    """
    if hasattr(os, "posix_fadvise"):
        _daemon(_begin, model)


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
        pieces = iter([(f, begin) for f in files for begin in range(0, sizes[f], _AT_ONCE)])
        for _ in range(_THREADS):
            _daemon(_advise, pieces)


def _advise(pieces: Iterator[tuple[Path, int]]) -> None:
    """Asks for the pieces that no other thread has taken."""
    with contextlib.suppress(OSError):
        for file, begin in pieces:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(descriptor, begin, _AT_ONCE, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
