"""Brings a model's files into the page cache while jax is imported and started.

Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path

from host_offload.memory.device_memory import host_available_bytes

_AT_ONCE = 64 << 20


@functools.cache
def read_ahead(model: str) -> None:
    """Begins to read, in a thread, the files of a local checkpoint of which the memory that this
    process can take holds two copies. An error is not told: loading meets it too.

    - `model`: a directory with safetensors files, or a GGUF file; nothing is read of another.
    """
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=_advise, args=(model,), name="moejax-ahead", daemon=True).start()


def _advise(model: str) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # also of a path that is none
        path = Path(model).expanduser()
        files = [path] if path.suffix == ".gguf" else sorted(path.glob("model*.safetensors"))
        sizes = [file.stat().st_size for file in files]
        if 2 * sum(sizes) > host_available_bytes():
            return
        for file, size in zip(files, sizes, strict=True):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for begin in range(0, size, _AT_ONCE):
                    os.posix_fadvise(descriptor, begin, _AT_ONCE, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
