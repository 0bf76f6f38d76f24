"""Files of JSON lines that stay whole if a process is killed."""

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
        """Writes a whole line to the disk. If the process is killed, a piece of the line may stay,
        which the next `open_line_file` cuts off. Raises UserError if the line cannot be written,
        and if another program has removed, moved or changed the file."""
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
    """Opens the file without a torn last line, and locks it while it is open.

    - `read`: returns the lines of its bytes; an error that it raises leaves the file unchanged.

    Raises UserError for a file that another process writes or that cannot be opened.
    """
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
    """Returns the lines of a file, without a torn last line. Raises UserError for a file that
    cannot be read, and what `read` raises."""
    try:
        return read(Path(name).read_bytes())
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None


def parsed_lines(
    name: str | os.PathLike[str], data: bytes, wrong: str, advice: str, keys: frozenset[str]
) -> list[dict[str, Any]]:
    """Returns the objects in the whole lines of a file's bytes.

    - `wrong`, `advice`: for the message, what a bad line is and what to do.

    Raises UserError for a line that is no object or lacks one of the keys.
    """
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
    """Returns how many bytes the whole lines have."""
    return data.rfind(b"\n") + 1
