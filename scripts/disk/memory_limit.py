"""A process under a limit of memory that the kernel enforces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from moejax.errors import UserError

CONTROLLER = Path("/sys/fs/cgroup/memory")
"""Where cgroups of version 1 are told how much memory they may have."""


@contextlib.contextmanager
def limited(nbytes: int, name: str = "") -> Iterator[Path]:
    """A memory cgroup of its own with this limit, page cache included; several at once have names.
    Raises UserError where there is no controller that this process may use."""
    group = CONTROLLER / f"moejax-{os.getpid()}{name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
    except OSError as error:
        raise UserError(
            f"{group}: {error.strerror}; this needs the memory controller of cgroups version 1, "
            "mounted there and writable"
        ) from None
    try:
        yield group
    finally:
        group.rmdir()


def entering(group: Path) -> list[str]:
    """What a command begins with that runs in the cgroup from its first instruction."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]


def run(group: Path, command: Sequence[str]) -> str:
    """What a command writes to stdout that runs in the cgroup from its first instruction. Raises
    UserError with the end of its stderr where it fails, as where the kernel kills it."""
    done = subprocess.run([*entering(group), *command], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip()[-800:] or f"exit status {done.returncode}"
        raise UserError(f"the process under the limit failed ({done.returncode}): {why}")
    return done.stdout


def usage(group: Path) -> dict[str, int]:
    """The most bytes that its processes had, page cache included, and how often the limit held one
    back."""
    return {
        "peak": int((group / "memory.max_usage_in_bytes").read_text()),
        "held_back": int((group / "memory.failcnt").read_text()),
    }
