"""The input of a file job: lines of a file, or of something that can be read only once."""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from moejax.errors import UserError

MOST_LINE = 16 * 2**20
"""Bytes of a line: a prompt of millions of tokens, and no more than a few hundred MB of objects
while it is read."""


class JobInput(abc.ABC):
    """What a job reads. again: whether `lines` can be called once more."""

    again: bool

    @abc.abstractmethod
    def lines(self) -> Iterator[bytes]:
        """All lines, from the first one; of one with more than MOST_LINE bytes MOST_LINE + 1."""

    @abc.abstractmethod
    def place(self, number: int) -> str:
        """Where line `number`, counted from 1 and read already, stands, for messages."""

    def is_at(self, output: str) -> bool:
        """Whether that file or directory is what is read."""
        return False


class StreamInput(JobInput):
    """An open file, standard input or a pipe."""

    def __init__(self, name: str, stream: IO[bytes]):
        self.name, self._stream = name, stream
        self.again = stream.seekable()
        self._begin = stream.tell() if self.again else 0

    def lines(self) -> Iterator[bytes]:
        if self.again:
            self._stream.seek(self._begin)
        return bounded_lines(self._stream)

    def place(self, number: int) -> str:
        return f"{self.name}, line {number}"

    def is_at(self, output: str) -> bool:
        try:
            return os.path.samestat(os.fstat(self._stream.fileno()), os.stat(output))
        except OSError:  # no such output yet, or an input that is no file
            return False


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream, cut as JobInput.lines says: no line takes more memory."""
    while raw := stream.readline(MOST_LINE + 1):
        yield raw
        while len(raw) > MOST_LINE and not raw.endswith(b"\n"):
            raw = stream.readline(MOST_LINE + 1)


@contextmanager
def open_input(name: str) -> Iterator[JobInput]:
    """The file of that name; `-` is standard input. Raises UserError where it cannot be opened."""
    if name == "-":
        yield StreamInput(name, sys.stdin.buffer)
        return
    try:
        stream = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot open {name}: {error.strerror}") from error
    with stream:
        yield StreamInput(name, stream)
