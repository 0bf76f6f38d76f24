"""Commands in a control group of Linux, and pages that leave its page cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from moejax.errors import UserError

MEMORY = Path("/sys/fs/cgroup/memory")
"""The controller of memory of cgroups v1; v2 has none of its own."""


def in_cgroup(directory: Path, limit: str, value: str) -> list[str]:
    """The beginning of a command in a control group with this limit."""
    script = (
        f'echo {value} > {directory}/{limit} && echo $$ > {directory}/cgroup.procs && exec "$@"'
    )
    return ["sh", "-c", script, "sh"]


@contextlib.contextmanager
def memory_group(name: str, nbytes: int) -> Iterator[tuple[list[str], Path]]:
    """Makes a group of that memory, and removes it. Yields the beginning of a command in it, and
    the file that says the most that it took. Raises UserError where there can be none."""
    first = MEMORY.is_dir()
    group = (MEMORY if first else MEMORY.parent) / f"moejax-{name}-{os.getpid()}"
    limit, peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    if not first:
        limit, peak = "memory.max", "memory.peak"
    try:
        group.mkdir()
    except OSError as error:
        raise UserError(f"{group}: no control group: {error.strerror}; run as root") from None
    try:
        if not (group / limit).exists():
            raise UserError(f"{group} has no {limit}: its parent does not share out memory")
        yield in_cgroup(group, limit, str(nbytes)), group / peak
    finally:
        group.rmdir()


def drop_pages(path: Path) -> None:
    """Takes a file, or the files of a folder, out of the page cache."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
