"""The rate at which a disk gives records, read past the page cache by nothing but reads."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import threading
import time
from collections.abc import Sequence

CHUNK = 1 << 20
"""Bytes of a read: the queue's."""


def read_rate(paths: Sequence[str], threads: int) -> float:
    """Bytes per second of whole files, each once, by so many threads."""
    local = threading.local()

    def read(path: str) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, CHUNK)  # whole pages, as O_DIRECT wants
        fd, got = os.open(path, os.O_RDONLY | os.O_DIRECT), 0
        try:
            while count := os.preadv(fd, [local.buffer], got):
                got += count
                if count % mmap.PAGESIZE:
                    break
        finally:
            os.close(fd)
        return got

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        total = sum(pool.map(read, paths))
        return total / (time.perf_counter() - began)
