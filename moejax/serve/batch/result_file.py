"""The output file of a job. It is locked, scanned for earlier results, and appended to line by
line."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from moejax.errors import UserError
from moejax.interrupt import deferred_interrupt
from moejax.output_lock import lock_output, require_in_place
from moejax.serve.batch.result_lines import read_result

SYNC_S = 10.0
"""Seconds of results that a power cut may take; a killed process loses nothing."""

_LINE_BEGIN = b'{"id": '


class ResultFile:
    """A file of lines, or output that is no file (a pipe, a device, `-`). Made by `open_results`.

    - `file`: unbuffered.
    """

    def __init__(self, name: str, file: IO[bytes], regular: bool):
        self.name, self.regular = name, regular
        self.keys: set[bytes] = set()
        """Keys (`read_result`) of the results that the file had when it was opened."""
        self.errors = 0
        """Number of errors among those results."""
        self.count = 0
        """Number of whole results in the file now."""
        self.size = 0
        """Bytes of whole results. Anything after them is a torn line."""
        self._file = file
        self._checked = False
        """Whether the job has begun to write the file, which must then keep its name and size."""
        self._synced_s = time.monotonic()

    def begin(self, *, overwrite: bool) -> None:
        """Cuts off a torn last line, or everything."""
        if overwrite:
            self.keys, self.errors, self.count, self.size = set(), 0, 0, 0
        if self.regular:
            self._file.truncate(self.size)
            self._file.seek(self.size)
            self._checked = True

    def append(self, line: bytes) -> None:
        """Writes one whole line, with one call unless the system takes only a part.

        Raises UserError if the line cannot be written; the file then ends after the previous line.
        """
        try:
            with deferred_interrupt():
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
                if not self.regular:
                    self._file.flush()
                self.size += len(line)
                self.count += 1
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.regular:
                with suppress(OSError):
                    self._file.truncate(self.size)
            raise self._unwritable(error) from error
        if time.monotonic() - self._synced_s > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Flushes written lines to the disk. Raises UserError if the disk does not take them, or if
        another program has removed, moved or changed the file."""
        if self.regular:
            try:
                os.fsync(self._file.fileno())
                if self._checked:
                    self._check_place()
            except OSError as error:
                raise self._unwritable(error) from error
        self._synced_s = time.monotonic()

    def _check_place(self) -> None:
        self._checked = False  # once it is said
        require_in_place(
            self._file.fileno(),
            self.name,
            self.size,
            f"its {self.count} results",
            "choose another --output, or start anew with --overwrite",
        )
        self._checked = True

    def _unwritable(self, error: OSError) -> UserError:
        kept = (
            "; its results so far are whole, and the same command goes on from there"
            if self.regular
            else ""
        )
        return UserError(f"cannot write to {self.name}: {error.strerror}{kept}")

    def read_stored(self) -> Iterator[tuple[str, bytes]]:
        """Yields (place, line) of each whole result in a regular file."""
        # Reading from the unbuffered file itself would be one call for every byte.
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            try:
                reader.seek(0)
                for number, raw in enumerate(reader, 1):
                    place = f"{self.name}, line {number}"
                    if raw.endswith(b"\n"):
                        yield place, raw
                        continue
                    begin = raw.rstrip(b"\0")  # a file system's own, of bytes that a power cut took
                    if not (_LINE_BEGIN.startswith(begin) or begin.startswith(_LINE_BEGIN)):
                        raise not_a_result(place)
            except OSError as error:
                raise UserError(f"cannot read {self.name}: {error.strerror}") from error

    def scan(self) -> None:
        """Reads the results that the file has. Raises UserError for a line that is no result, or a
        result that is there twice."""
        for place, raw in self.read_stored():
            try:
                _, key, error = read_result(raw)
            except (ValueError, RecursionError):
                raise not_a_result(place) from None
            if key in self.keys:
                raise UserError(
                    f"{place}: this result appears twice; remove one, or start anew with "
                    "--overwrite"
                )
            self.keys.add(key)
            self.errors += error
            self.count += 1
            self.size += len(raw)

    def first_not_in(self, keys: set[bytes]) -> tuple[str, str | int]:
        """Returns (place, id) of the first result whose key is not among the keys."""
        for place, raw in self.read_stored():
            id, key, _ = read_result(raw)
            if key not in keys:
                return place, id
        raise LookupError(f"every result of {self.name} is among the keys")

    def options(self) -> dict[str, Any] | None:
        """Returns the options of the run that wrote the results, which are in its first result."""
        for _, raw in self.read_stored():
            metrics = json.loads(raw).get("metrics")
            job = metrics.get("job") if isinstance(metrics, dict) else None
            if isinstance(job, dict):
                return job
        return None


def not_a_result(place: str) -> UserError:
    return UserError(
        f"{place}, is no result of moejax; choose another --output, or start anew with --overwrite"
    )


READER_S = 5.0
"""Seconds that a pipe as output waits for its reader."""


@contextmanager
def open_results(output: str, *, overwrite: bool) -> Iterator[ResultFile]:
    """Opens, locks and scans the output. It changes nothing, except that it creates a missing file.

    The lock is flock's, on the file itself: it ends with the process, however the process ends.

    Raises UserError for a file that cannot be opened, that another process writes, or that has
    other content than results.
    """
    if output == "-":
        # Unbuffered: Python's buffers would keep what they cannot write and try again at exit.
        stream = sys.stdout.buffer
        yield ResultFile("standard output", getattr(stream, "raw", stream), regular=False)
        return
    special = os.path.exists(output) and not os.path.isfile(output)
    # Appending: if another program cuts the file, its size stays smaller than what was written.
    own = os.O_RDWR | os.O_CREAT | os.O_APPEND
    descriptor = _open_output(output, os.O_WRONLY if special else own)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        results = ResultFile(output, file, regular=not special)
        if results.regular:
            lock_output(file, results.name)
            if not overwrite:
                results.scan()
        try:
            yield results
        finally:
            results.sync()


def _open_output(output: str, flags: int) -> int:
    """Returns a descriptor of the output. Opening a pipe without a reader would wait forever, so
    this waits READER_S for the reader. Raises UserError."""
    deadline = time.monotonic() + READER_S
    while True:
        try:
            descriptor = os.open(output, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            os.set_blocking(descriptor, True)
            return descriptor
        except OSError as error:
            if error.errno != errno.ENXIO:
                reason = error.strerror
            elif time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            else:
                reason = f"it is a pipe without a reader for {READER_S:.0f} s; start its reader"
            raise UserError(f"cannot open {output} for writing: {reason}") from error
