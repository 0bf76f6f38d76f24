"""The output of a job on several machines: a directory of parts, each written whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from moejax.errors import UserError
from moejax.interrupt import deferred_interrupt
from moejax.output_lock import lock_output
from moejax.serve.batch.job import Job, OpenJob, survey
from moejax.serve.batch.result_lines import read_result
from moejax.serve.batch.results import Results
from moejax.serve.cluster.inputs import ClusterInputs, filesystem

PART_S = 10.0
"""Seconds of results that a kill may take; they are made again, with the same bits."""

PART_BYTES = 64 << 20
"""Bytes of results at which a part is written sooner."""

FORMATS = ("jsonl", "parquet")

_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")
_LOCK = ".moejax.lock"


class PartFiles(Results):
    """A directory of parts. Made by `open_parts`. system: Arrow's, in which directory is; local:
    whether it is this machine's."""

    def __init__(self, name: str, system: Any, directory: str, format: str, local: bool):
        super().__init__(name, regular=True)
        self._system, self.directory, self._format = system, directory, format
        self._local = local
        self._parts = _parts(system, directory, name)
        numbers = [int(match[1]) for part in self._parts if (match := _PART.fullmatch(part))]
        self._next = max(numbers, default=-1) + 1
        self._held: list[bytes] = []
        self._held_bytes, self._written_s = 0, time.monotonic()

    def begin(self, *, overwrite: bool) -> None:
        if overwrite:
            for part in self._parts:
                self._system.delete_file(f"{self.directory}/{part}")
            self.forget()
            self._parts = []
        self._written_s = time.monotonic()

    def append(self, line: bytes) -> None:
        """Takes a result; a part is written every PART_S or PART_BYTES."""
        self._held.append(line)
        self._held_bytes += len(line)
        self.count += 1
        if self._held_bytes > PART_BYTES or time.monotonic() - self._written_s > PART_S:
            self.write()

    def write(self) -> None:
        """Writes a part of all results in memory. Raises UserError where it cannot be; nothing of
        it is there then."""
        if not self._held:
            return
        name = f"{self.directory}/part-{self._next:05}.{self._format}"
        # A local file gets its name when it is whole; an object of a store is there when it is.
        target = f"{self.directory}/.part-{self._next:05}.new" if self._local else name
        try:
            with deferred_interrupt():
                self._write_to(target)
                if self._local:
                    os.replace(target, name)
        except OSError as error:
            # They are not in the directory, and whoever ends now must not try again.
            self.count -= len(self._held)
            self._held, self._held_bytes = [], 0
            with contextlib.suppress(OSError):
                self._system.delete_file(target)
            why = error.strerror or str(error).split("\n")[0]
            raise UserError(
                f"cannot write to {self.name}: {why}; its parts so far are whole, and the same "
                "command goes on from there"
            ) from error
        self._next += 1
        self._held, self._held_bytes = [], 0
        self._written_s = time.monotonic()

    def _write_to(self, target: str) -> None:
        if self._format == "jsonl":
            with self._system.open_output_stream(target, compression=None) as file:
                file.write(b"".join(self._held))
        else:
            _write_parquet(self._system, target, self._held)
        if self._local:
            with open(target, "rb") as file:
                os.fsync(file.fileno())

    def stored(self) -> Iterator[tuple[str, bytes]]:
        for part in self._parts:
            try:
                yield from self._lines(part)
            except (OSError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
                why = str(error).split("\n")[0]
                raise UserError(f"{self.name}/{part} cannot be read: {why}") from error

    def _lines(self, part: str) -> Iterator[tuple[str, bytes]]:
        path = f"{self.directory}/{part}"
        if part.endswith(".parquet"):
            from pyarrow import parquet

            with self._system.open_input_file(path) as file:
                column = parquet.read_table(file, columns=["result"])["result"]
            for number, text in enumerate(column.to_pylist(), 1):
                yield f"{self.name}/{part}, row {number}", text.encode()
            return
        with self._system.open_input_stream(path, compression=None) as file:
            data = file.read()
        for number, raw in enumerate(data.splitlines(keepends=True), 1):
            yield f"{self.name}/{part}, line {number}", raw


@contextlib.contextmanager
def open_parts(output: str, format: str, *, overwrite: bool) -> Iterator[PartFiles]:
    """Makes, locks and scans the directory; nothing that is there is changed yet. On leaving, what
    is in memory is written.

    Raises UserError for a directory that cannot be made or has something else in it, for one that
    another process writes (local ones only: stores of objects have no locks), and as `scan`.
    """
    system, directory = filesystem(output)
    local = "://" not in output or output.startswith("file://")
    try:
        system.create_dir(directory, recursive=True)
        with _locked(directory if local else None, output):
            results = PartFiles(output, system, directory, format, local)
            if not overwrite:
                results.scan()
            try:
                yield results
            finally:
                results.write()
    except OSError as error:
        why = error.strerror or str(error).split("\n")[0]
        raise UserError(f"cannot open {output} for writing: {why}") from error


def _parts(system: Any, directory: str, output: str) -> list[str]:
    """Names of the parts that are there."""
    from pyarrow import fs

    names = sorted(info.base_name for info in system.get_file_info(fs.FileSelector(directory)))
    for name in names:
        if not (name.startswith((".", "_")) or _PART.fullmatch(name)):
            raise UserError(
                f"{output} has {name}, which is no part of a job's results; choose another --output"
            )
    return [name for name in names if _PART.fullmatch(name)]


@contextlib.contextmanager
def _locked(directory: str | None, output: str) -> Iterator[None]:
    """The lock is flock's, as of a result file: it ends with the process."""
    if directory is None:
        yield
        return
    with open(os.path.join(directory, _LOCK), "wb") as file:
        lock_output(file, output)
        yield


@contextlib.contextmanager
def open_cluster_job(job: Job, paths: Sequence[str], format: str = "jsonl") -> Iterator[OpenJob]:
    """`open_job` for the files at these paths and a directory, job.output, of parts in this format.
    The job is the same otherwise; its `run` takes a Fleet."""
    if format not in FORMATS:
        raise UserError(f"the format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if "-" in paths or job.output == "-":
        raise UserError(
            "a job on several machines goes on after a kill, so it reads and writes "
            "files, not - for standard input or output"
        )
    if os.path.exists(job.output) and not os.path.isdir(job.output):
        raise UserError(
            f"{job.output} is a file, and the output of a job on several machines is a directory; "
            "choose another --output"
        )
    source = ClusterInputs(paths)
    with open_parts(job.output, format, overwrite=job.overwrite) as results:
        if source.is_at(results.directory):
            raise UserError(f"{job.output} is both --input and --output; choose another --output")
        yield survey(job, source, results)


def columns(raw: bytes) -> dict[str, Any]:
    """A result as columns: what most want of the first sequence by name, and all of it, as the line
    that a file of JSON lines has, as `result`."""
    id, _, failed = read_result(raw)
    record = json.loads(raw)
    body = record if "custom_id" not in record else record["response"]["body"]
    first = (body.get("outputs") or body.get("choices") or [body])[0]
    message = first.get("message")
    error = record["error"]
    usage = body.get("usage") or {}
    return {
        "id": str(id),
        "text": message["content"] if message else first.get("text"),
        "token_ids": first.get("token_ids"),
        "finish_reason": first.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error": error["message"] if failed else None,
        "result": raw.decode().rstrip("\n"),
    }


def result_schema() -> Any:
    """The Arrow schema of `columns`."""
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int32()
    return pyarrow.schema(
        {
            "id": text,
            "text": text,
            "token_ids": pyarrow.list_(number),
            "finish_reason": text,
            "prompt_tokens": number,
            "completion_tokens": number,
            "error": text,
            "result": text,
        }
    )


def _write_parquet(system: Any, target: str, lines: list[bytes]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([columns(line) for line in lines], result_schema())
    parquet.write_table(table, target, filesystem=system, compression="zstd")
