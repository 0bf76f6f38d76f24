"""One process writes an output."""

from __future__ import annotations

import fcntl
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
