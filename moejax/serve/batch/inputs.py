"""The input of a file job: lines of a file, or of something that can be read only once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from moejax.errors import UserError

MOST_LINE = 16 * 2**20
"""Bytes of a line: a prompt of millions of tokens, and no more than a few hundred MB of objects
while it is read."""


class JobInput:
    """What a job reads: an open file, standard input or a pipe."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self.again = stream.seekable()
        """Whether `lines` can be called once more."""
        self._begin = stream.tell() if self.again else 0

    def lines(self) -> Iterator[bytes]:
        """All lines; of one with more than MOST_LINE bytes MOST_LINE + 1, so that no line takes
        more memory."""
        if self.again:
            self._stream.seek(self._begin)
        while raw := self._stream.readline(MOST_LINE + 1):
            yield raw
            while len(raw) > MOST_LINE and not raw.endswith(b"\n"):
                raw = self._stream.readline(MOST_LINE + 1)

    def is_at(self, output: str) -> bool:
        """Whether that file is what is read."""
        try:
            return os.path.samestat(os.fstat(self._stream.fileno()), os.stat(output))
        except OSError:  # no such output yet, or an input that is no file
            return False


@contextmanager
def open_input(name: str) -> Iterator[JobInput]:
    """The file of that name; `-` is standard input. Raises UserError where it cannot be opened."""
    if name == "-":
        yield JobInput(sys.stdin.buffer)
        return
    try:
        stream = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot open {name}: {error.strerror}") from error
    with stream:
        yield JobInput(stream)
