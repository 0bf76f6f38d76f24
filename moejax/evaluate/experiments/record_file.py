"""Files of records: JSON lines that a killed process leaves whole."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moejax.errors import UserError, shown
from moejax.interrupt import deferred_interrupt

DEFINITION, RECORDS, SESSIONS = "experiment.json", "records.jsonl", "sessions.jsonl"
"""Files of a directory of results: what was asked, a line for each run, a line for each start."""


@dataclasses.dataclass
class RecordFile:
    """An open file of lines. Made by `open_records`."""

    path: Path
    descriptor: int
    lines: list[dict[str, Any]]

    def append(self, line: Mapping[str, Any]) -> None:
        """Puts a line on the disk whole, or, where the process is killed, a piece of it, which the
        next `open_records` cuts off. Raises UserError where it cannot be written."""
        rest = memoryview(f"{json.dumps(line)}\n".encode())
        try:
            with deferred_interrupt():
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
                os.fsync(self.descriptor)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from error
        self.lines.append(dict(line))


@contextmanager
def open_records(path: Path) -> Iterator[RecordFile]:
    """The file, locked while it is open, without a torn last line. Raises UserError for a file that
    another process writes, cannot be opened, or is something else."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot open {path} for writing: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {path}; wait for its end, or choose another --output"
            ) from None
        data = path.read_bytes()
        lines = _parsed(path, data)
        os.ftruncate(descriptor, data.rfind(b"\n") + 1)
        yield RecordFile(path, descriptor, lines)
    finally:
        os.close(descriptor)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a torn last one is none. Raises UserError for a file that cannot be read
    or is something else."""
    try:
        return _parsed(path, path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(path: Path, data: bytes) -> list[dict[str, Any]]:
    lines = []
    for number, raw in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise UserError(
                f"{path}, line {number}, is no record but {shown(raw.decode('utf-8', 'replace'))}; "
                "delete the file, or choose another --output"
            )
        lines.append(line)
    return lines


def require_same(directory: Path, asked: Mapping[str, Any]) -> None:
    """Writes what was asked into a new directory of results; of one that is there raises UserError
    unless it is of the same, saying by what they differ."""
    path, now = directory / DEFINITION, json.loads(json.dumps(asked))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            written = path.with_suffix(".new")  # a killed run may have left it
            if others := sorted(p.name for p in directory.iterdir() if p != written):
                raise UserError(
                    f"{directory} is no directory of results, it has {shown(others[0])}; choose "
                    "another --output"
                )
            written.write_text(json.dumps(now, indent=1) + "\n")
            os.replace(written, path)
            return
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read or written: {error}") from None
    if not isinstance(before, dict):
        raise UserError(f"{path} is no definition; choose another --output")
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing:
        said = "; ".join(
            f"{name} was {shown(before.get(name), 200)} and is {shown(now.get(name), 200)}"
            for name in differing
        )
        raise UserError(
            f"{directory} has results of another experiment: {said}. Give the same, or choose "
            "another --output"
        )
