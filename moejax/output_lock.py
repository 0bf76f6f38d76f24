"""Locks an output file for one process, and checks that no other program moved or changed it."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from typing import IO, Any

from moejax.errors import UserError


def lock_output(file: IO[Any] | int, name: str) -> None:
    """Locks an open file until it is closed or the process ends.

    - `name`: the file's name, for the message.

    Raises UserError where another process has the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is writing {name}; wait for its end, or choose another --output"
        ) from None


def require_in_place(descriptor: int, name: str, size: int, content: str, advice: str) -> None:
    """Raises UserError unless an open file still has its name and size. Other programs may remove,
    replace, move or cut it. If the file has no name any more, its content is copied beside `name`.

    - `descriptor`: of the open file.
    - `size`: the bytes that were written.
    - `content`: the file's content in words, for the message.
    - `advice`: what to do about a changed file, for the message.
    """
    held = os.fstat(descriptor)
    if held.st_size != size:
        raise UserError(
            f"{name} has {held.st_size} bytes and not the {size} that were written: another "
            f"program changed it meanwhile, so it cannot be trusted; {advice}"
        )
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(name), held):
            return
    with suppress(OSError):  # only Linux shows where the file is now
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
