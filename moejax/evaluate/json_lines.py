"""Files of JSON lines that a killed process leaves whole."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moejax.errors import UserError, shown
from moejax.interrupt import deferred_interrupt
from moejax.output_lock import lock_output, require_in_place


@dataclasses.dataclass
class LineFile:
    """An open file of lines. Made by `open_line_file`."""

    name: str | os.PathLike[str]
    descriptor: int
    lines: list[dict[str, Any]]

    def __post_init__(self) -> None:
        self._size = os.fstat(self.descriptor).st_size

    def append(self, line: Mapping[str, Any]) -> None:
        """Puts a line on the disk whole, or, where the process is killed, a piece of it, which the
        next `open_line_file` cuts off. Raises UserError where it cannot be written, and where
        another program has removed, moved or changed the file meanwhile."""
        rest = memoryview(f"{json.dumps(line)}\n".encode())
        self._size += len(rest)
        try:
            with deferred_interrupt():
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
                os.fsync(self.descriptor)
            count, name = len(self.lines) + 1, os.fspath(self.name)
            require_in_place(
                self.descriptor, name, self._size, f"its {count} lines", "choose another --output"
            )
        except OSError as error:
            raise UserError(f"cannot write to {self.name}: {error.strerror}") from error
        self.lines.append(dict(line))


@contextmanager
def open_line_file(
    name: str | os.PathLike[str], read: Callable[[bytes], list[dict[str, Any]]]
) -> Iterator[LineFile]:
    """The file, locked while it is open, without a torn last line. read: the lines of its bytes;
    what it raises leaves the file as it is. Raises UserError for a file that another process writes
    or that cannot be opened."""
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot open {name} for writing: {error.strerror}") from None
    try:
        lock_output(descriptor, str(name))
        data = Path(name).read_bytes()
        lines = read(data)
        os.ftruncate(descriptor, whole_bytes(data))
        yield LineFile(name, descriptor, lines)
    finally:
        os.close(descriptor)


def read_line_file(
    name: str | os.PathLike[str], read: Callable[[bytes], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The lines of a file; a torn last one is none. Raises UserError for a file that cannot be
    read, and what `read` raises."""
    try:
        return read(Path(name).read_bytes())
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None


def parsed_lines(
    name: str | os.PathLike[str], data: bytes, wrong: str, advice: str, keys: frozenset[str]
) -> list[dict[str, Any]]:
    """The objects in the whole lines of a file's bytes. Raises UserError for a line that is none,
    or lacks one of the keys: it is `wrong`, and what to do is `advice`."""
    lines = []
    for number, raw in enumerate(data[: whole_bytes(data)].splitlines(), 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not line.keys() >= keys:
            raise UserError(
                f"{name}, line {number}, is {wrong} but {shown(raw.decode('utf-8', 'replace'))}; "
                f"{advice}"
            )
        lines.append(line)
    return lines


def whole_bytes(data: bytes) -> int:
    """How many bytes the whole lines are."""
    return data.rfind(b"\n") + 1
