"""The file of an evaluation's results: one JSON line a run, or one a step of a training run."""

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


@dataclasses.dataclass
class ResultLines:
    """An open file of results. Made by `open_lines`."""

    name: str
    descriptor: int
    lines: list[dict[str, Any]]

    @property
    def steps(self) -> set[int]:
        """The steps that have a line."""
        return {line["step"] for line in self.lines if line["step"] is not None}

    def append(self, line: Mapping[str, Any]) -> None:
        """Puts a line on the disk whole, or, where the process is killed, a piece of it, which the
        next `open_lines` cuts off. Raises UserError where it cannot be written."""
        rest = memoryview(f"{json.dumps(line)}\n".encode())
        try:
            with deferred_interrupt():
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
                os.fsync(self.descriptor)
        except OSError as error:
            raise UserError(f"cannot write to {self.name}: {error.strerror}") from error
        self.lines.append(dict(line))


@contextmanager
def open_lines(name: str, asked: Mapping[str, Any], *, resume: bool) -> Iterator[ResultLines]:
    """The file, locked while it is open. asked: what decides the figures, as plain data for JSON;
    each line has it. resume: go on after the lines that are there.

    Raises UserError for a file that another process writes, that is something else than results,
    that has any without resume, or results of other options, and says which.
    """
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot open {name} for writing: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {name}; wait for its end, or choose another --output"
            ) from None
        lines, whole = _parsed(name, Path(name).read_bytes())
        if lines and not resume:
            raise UserError(f"{name} has results already; choose another --output")
        for line in lines:
            _require_same(name, line["asked"], json.loads(json.dumps(asked)))
        os.ftruncate(descriptor, whole)
        yield ResultLines(name, descriptor, lines)
    finally:
        os.close(descriptor)


def read_lines(name: str) -> list[dict[str, Any]]:
    """The results in a file; a torn last line is none. Raises UserError for a file that cannot be
    read or is something else."""
    try:
        lines, _ = _parsed(name, Path(name).read_bytes())
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    if not lines:
        raise UserError(f"{name} has no results; moejax eval --output writes them")
    return lines


def _parsed(name: str, data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many bytes they are."""
    whole, lines = data.rfind(b"\n") + 1, []
    for number, raw in enumerate(data[:whole].splitlines(), 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not line.keys() >= {"step", "asked", "units"}:
            raise UserError(
                f"{name}, line {number}, is no result of moejax eval but "
                f"{shown(raw.decode('utf-8', 'replace'))}; choose another --output"
            )
        lines.append(line)
    if not lines and data and not b'{"step": '.startswith(data[:9]):
        raise UserError(f"{name} is no file of results; choose another --output")
    return lines, whole


def _require_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError that names the first option by which the results differ."""
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{name} has results of another {key}: {shown(before.get(key))}, and this run has "
                f"{shown(now.get(key))}; give the same, or choose another --output"
            )
