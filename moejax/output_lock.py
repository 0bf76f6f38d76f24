"""One process writes an output, which keeps its place meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from typing import IO, Any

from moejax.errors import UserError


def lock_output(file: IO[Any] | int, name: str) -> None:
    """Locks an open file as long as it is open; the lock ends with its process. Raises UserError
    with `name` where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is writing {name}; wait for its end, or choose another --output"
        ) from None


def require_in_place(descriptor: int, name: str, size: int, content: str, advice: str) -> None:
    """Raises UserError unless an open file still has its name and so many bytes: other programs may
    remove, replace, move or cut what is written. What nobody could find any more is copied beside
    it. content: what is in it, for people; advice: what to do about a file that was changed."""
    held = os.fstat(descriptor)
    if held.st_size != size:
        raise UserError(
            f"{name} has {held.st_size} bytes and not the {size} that were written: another "
            f"program changed it meanwhile, so it cannot be trusted; {advice}"
        )
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(name), held):
            return
    with suppress(OSError):  # Linux says where the file is now; elsewhere it is copied
        moved = os.readlink(f"/proc/self/fd/{descriptor}")
        if held.st_nlink and os.path.samestat(os.stat(moved), held):
            raise UserError(
                f"{name} was moved to {moved} while it was written; {content} are there: move it "
                "back, and the same command goes on"
            )
    kept = f"{name}.recovered-{os.getpid()}"
    with open(descriptor, "rb", closefd=False) as reader, open(kept, "xb") as copy:
        reader.seek(0)
        shutil.copyfileobj(reader, copy)
        os.fsync(copy.fileno())
    raise UserError(
        f"the output was removed or replaced while it was written; {content} are in {kept}: move "
        "that to the output's place, and the same command goes on"
    )
