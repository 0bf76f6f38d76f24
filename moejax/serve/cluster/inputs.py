"""The input of a job on several machines: files of JSON lines and Parquet, read as one."""

from __future__ import annotations

import bisect
import collections
import io
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moejax.errors import UserError, shown
from moejax.serve.batch.inputs import JobInput, bounded_lines

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet")
"""Names of files that are taken from a directory."""

BATCH = 256
"""Rows of Parquet that are in memory at once, beside the file's own pieces."""


class ClusterInputs(JobInput):
    """Lines of all files, one after the other, numbered through: as `cat` of them would give, with
    a row of Parquet for a line.

    paths: files, directories (their files with one of SUFFIXES, by name, at any depth) and URIs of
    any file system that Arrow opens (s3://, gs://, hdfs://). Raises UserError for what cannot be
    opened, and for a directory with nothing to read.
    """

    again = True

    def __init__(self, paths: Sequence[str]):
        self.files = [found for path in paths for found in _files(path)]
        named = collections.Counter(name for _, name in self.files)
        if twice := [name for name, count in named.items() if count > 1]:
            raise UserError(f"{twice[0]} is named twice in --input; each file is read once")
        self._begins: list[int] = []

    def place(self, number: int) -> str:
        index = bisect.bisect_right(self._begins, number - 1) - 1
        _, name = self.files[index]
        kind = "row" if name.endswith(".parquet") else "line"
        return f"{name}, {kind} {number - self._begins[index]}"

    def is_at(self, output: str) -> bool:
        return any(name.startswith(f"{output}/") for _, name in self.files)

    def lines(self) -> Iterator[bytes]:
        number, self._begins = 0, []
        for system, name in self.files:
            self._begins.append(number)
            rows = _rows if name.endswith(".parquet") else _lines
            try:
                for line in rows(system, name):
                    number += 1
                    yield line
            except OSError as error:  # Arrow's own errors of files are OSError and ValueError
                raise UserError(f"{name} cannot be read: {_reason(error)}") from error
            except ValueError as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{name} is no file of its kind: {error}") from error


def filesystem(path: str) -> tuple[Any, str]:
    """(Arrow's file system, the path in it). Raises UserError for a URI that it does not know."""
    try:
        from pyarrow import fs
    except ImportError:
        raise UserError(
            "files of a job on several machines are read by pyarrow: pip install 'moejax[ray]'"
        ) from None
    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(path)
    try:
        return fs.FileSystem.from_uri(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(path)} cannot be opened: {_reason(error)}") from error


def _files(path: str) -> list[tuple[Any, str]]:
    from pyarrow import fs

    system, inside = filesystem(path)
    try:
        (info,) = system.get_file_info([inside])
        if info.type == fs.FileType.File:
            return [(system, inside)]
        if info.type == fs.FileType.NotFound:
            raise UserError(f"cannot open {path}: No such file or directory")
        below = system.get_file_info(fs.FileSelector(inside, recursive=True))
    except OSError as error:
        raise UserError(f"cannot open {path}: {_reason(error)}") from error
    found = sorted(
        each.path
        for each in below
        if each.type == fs.FileType.File
        and each.base_name.endswith(SUFFIXES)
        and not each.base_name.startswith((".", "_"))
    )
    if not found:
        raise UserError(f"{path} has no file to read; names end in one of {', '.join(SUFFIXES)}")
    return [(system, name) for name in found]


def _lines(system: Any, name: str) -> Iterator[bytes]:
    """Lines of a file of JSON lines, of which .gz is uncompressed."""
    with system.open_input_stream(name) as raw, io.BufferedReader(raw, 1 << 20) as stream:
        yield from bounded_lines(stream)


def _rows(system: Any, name: str) -> Iterator[bytes]:
    """Rows as JSON objects, in the order of the columns; of a null value nothing is said."""
    from pyarrow import parquet

    with system.open_input_file(name) as file:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                yield row_line(row)


def row_line(row: dict[str, Any]) -> bytes:
    """A row as an input line. What JSON does not know stands as text, which is then refused or
    taken as the field says."""
    fields = {name: value for name, value in row.items() if value is not None}
    return json.dumps(fields, ensure_ascii=False, default=str).encode() + b"\n"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).split("\n")[0]
