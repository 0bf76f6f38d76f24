"""Writes traces. Steps are packed into arrays, and a background thread turns full chunks into
files."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from host_offload.control.step_record import StepRecord
from host_offload.traces.link import LinkTrace
from host_offload.traces.schema import (
    BITS,
    FORMAT,
    KINDS,
    VERSION,
    Mark,
    TraceError,
    TraceHeader,
    TransferTrace,
    chunk_name,
    columns,
)

MAX_LINES = 10_000
"""Most decisions, transfers, records of the queue and marks that wait for a chunk, since few steps
may have many of these."""

BATCH = 32
"""Steps that are packed at once. Packed one by one, most of the time would go into
numpy's calls."""

BATCH_BYTES = 8 << 20
"""Most bytes of the arrays of steps packed at once, since optional arrays may be as large as a
chunk."""


def require_new(directory: str | os.PathLike[str]) -> None:
    """Raises TraceError unless a trace could be written there: an empty or absent directory."""
    path = Path(directory)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise TraceError(
                f"{path} exists and is not an empty directory; a trace is never overwritten: "
                "name another directory or remove this one"
            )
        parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    except OSError as error:
        raise _unwritable(path, error) from error
    if not parent.is_dir():
        raise _unwritable(path, NotADirectoryError(f"{parent} is not a directory"))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(path, PermissionError(f"no permission to write in {parent}"))


class TraceWriter:
    """Writes a trace. `append` keeps a few steps, so their arrays must not change. A background
    thread writes a full chunk while the next one fills. A third chunk waits for the first, so
    memory is two chunks of about chunk_bytes (or of one step, if that is larger).

    Raises TraceError if the directory is not new or cannot be written. If a chunk could not be
    written, the next call raises the error, or `close` if no call came. What is left at the
    interpreter's exit is written then. Not for several threads.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        header: TraceHeader,
        chunk_bytes: int = 8 << 20,
    ):
        require_new(directory)
        self.directory, self.header = Path(directory), header
        self._columns = columns(header)
        self._chunk_bytes = chunk_bytes
        self._id = uuid.uuid4().hex
        self._chunks = self._steps = self._tokens = 0
        self._records: list[StepRecord] = []
        self._chunk = _ChunkParts()
        self._bytes = self._unpacked_bytes = 0
        """Bytes of the chunk, and of its records that are not packed."""
        self._row_bytes = {"token": 0, "step": 0, "draft": 0}
        for name, (dtype, row) in self._columns.items():
            self._row_bytes[name.split(".")[0]] += dtype.itemsize * int(np.prod(row))
        self._pending: Future | None = None
        self.failure: TraceError | None = None
        self.closed = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write_header()
        except OSError as error:
            raise _unwritable(self.directory, error) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trace-writer")
        atexit.register(self.close)
        self._process = os.getpid()

    def append(self, step: StepRecord) -> None:
        """Adds a step. Raises ValueError if an array is not of the header's shapes."""
        self._require_open()
        wanted = (len(step.user), self.header.layers, self.header.top_k)
        names = [name for name in ("ids", "weights") if f"token.{name}" in self._columns]
        shapes = {name: getattr(step, name).shape for name in names}
        if set(shapes.values()) != {wanted}:
            found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"{found} of a step of {wanted[0]} tokens must be {wanted}")
        self._records.append(step)
        nbytes = wanted[0] * self._row_bytes["token"] + self._row_bytes["step"]
        nbytes += _count_drafts(step) * self._row_bytes["draft"]
        self._bytes += nbytes
        self._unpacked_bytes += nbytes
        if self._bytes >= self._chunk_bytes:
            self._hand_over()
        elif len(self._records) >= BATCH or self._unpacked_bytes >= BATCH_BYTES:
            self._pack()

    def transfer(self, transfer: TransferTrace) -> None:
        """Adds a transfer whose fate is known."""
        self._add_line("transfers", transfer)

    def link(self, seen: LinkTrace) -> None:
        """Adds what policies saw of the queue of transfers beside compute."""
        self._add_line("link", [*seen[:3], *seen.use])

    def mark(self, mark: Mark) -> None:
        """Adds a named moment."""
        self._add_line("marks", mark)

    def decision(self, step: int, fields: Mapping[str, Any]) -> None:
        """Adds a line to decisions.jsonl: {"step": step, **fields}; numpy arrays become lists.
        Raises TypeError for values that JSON cannot hold."""
        self._add_line("decisions", {"step": step, **fields})

    def close(self) -> None:
        """Writes the rest and marks the trace as complete. Idempotent. Raises TraceError if
        something could not be written and no call has said so. A forked child leaves the files to
        its parent."""
        if self.closed or os.getpid() != self._process:
            return
        self.closed = True
        atexit.unregister(self.close)
        try:
            if self.failure is None:
                self._settle()
                try:
                    # Not by the thread, which takes no work at the interpreter's exit.
                    self._pack()
                    if self._chunk.packed or self._chunk.lines:
                        self._write(self._chunk, self._chunks)
                        self._chunks += 1
                    self._write_header(complete=True)
                except OSError as error:
                    raise _unwritable(self.directory, error) from error
        finally:
            self._pool.shutdown()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # ---- pieces

    def _require_open(self) -> None:
        if self.closed:
            raise TraceError(f"the trace {self.directory} is closed")
        if self.failure is not None:
            raise self.failure
        if self._pending is not None and self._pending.done():
            self._settle()

    def _add_line(self, name: str, content: Any) -> None:
        self._require_open()
        self._chunk.lines.append((name, json.dumps(content, default=_plain) + "\n"))
        if len(self._chunk.lines) >= MAX_LINES:
            self._hand_over()

    def _pack(self) -> None:
        if self._records:
            self._chunk.pack(self._records, self._columns)
            self._records, self._unpacked_bytes = [], 0

    def _hand_over(self) -> None:
        """Gives the chunk to the thread, once the thread is done with the previous one."""
        self._pack()
        self._settle()
        self._pending = self._pool.submit(self._write, self._chunk, self._chunks)
        self._chunks += 1
        self._chunk, self._bytes = _ChunkParts(), 0

    def _settle(self) -> None:
        """Waits for the chunk that is being written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            self.failure = _unwritable(self.directory, error)
            raise self.failure from error

    def _write(self, chunk: _ChunkParts, number: int) -> None:
        for name in dict.fromkeys(name for name, _ in chunk.lines):
            with open(self.directory / f"{name}.jsonl", "a") as file:
                file.writelines(line for of, line in chunk.lines if of == name)
        # First under another name, so that no reader sees half a chunk.
        content = chunk.encode(self._columns, {"trace": self._id, "chunk": str(number)})
        _replace(self.directory / chunk_name(number), content)
        self._steps += chunk.steps
        self._tokens += chunk.tokens

    def _write_header(self, complete: bool = False) -> None:
        counts = {"chunks": self._chunks, "steps": self._steps, "tokens": self._tokens}
        text = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "id": self._id,
                **dataclasses.asdict(self.header),
                "columns": {
                    name: {"dtype": dtype.name, "row": shape}
                    for name, (dtype, shape) in self._columns.items()
                },
                "complete": counts if complete else None,
            },
            indent=1,
            default=_plain,
        )
        _replace(self.directory / "trace.json", (text + "\n").encode())


Columns = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""The result of schema.columns."""


class _ChunkParts:
    """The steps of one chunk, packed some at a time, and lines of other files."""

    def __init__(self):
        self.packed: list[dict[str, np.ndarray]] = []
        self.finished: list[tuple[int, tuple[int, ...]]] = []
        self.lines: list[tuple[str, str]] = []
        self.steps = self.tokens = self.drafts = 0

    def pack(self, steps: Sequence[StepRecord], columns: Columns) -> None:
        """Packs steps into the chunk's arrays."""
        arrays = {}
        for name, (dtype, _) in columns.items():
            per, field = name.split(".")
            if field == "tokens":
                values: list[Any] = [len(step.user) for step in steps]
            elif field == "drafts":
                values = [*map(_count_drafts, steps)]
            elif field == "kind":
                values = [KINDS.index(step.kind) for step in steps]
            else:
                values = [getattr(step, field) for step in steps]
            array = np.array(values) if per == "step" else np.concatenate(values)
            if field in BITS:
                array = np.packbits(array, axis=2, bitorder="little")
            arrays[name] = array.astype(dtype, copy=False)
        self.packed.append(arrays)
        self.finished += [(step.number, step.finished) for step in steps if step.finished]
        self.steps += len(steps)
        self.tokens += sum(len(step.user) for step in steps)
        self.drafts += sum(map(_count_drafts, steps))

    def encode(self, columns: Columns, metadata: Mapping[str, str]) -> bytes:
        """The chunk as safetensors."""
        arrays = {
            name: np.concatenate([arrays[name] for arrays in self.packed])
            if self.packed
            else np.empty((0, *row), dtype)
            for name, (dtype, row) in columns.items()
        }
        counts = {name: str(getattr(self, name)) for name in ("steps", "tokens", "drafts")}
        finished = {"finished": json.dumps(self.finished)}
        return save(arrays, {"format": FORMAT, **metadata, **counts, **finished})


def _count_drafts(step: StepRecord) -> int:
    return 0 if step.draft_token is None else len(step.draft_token)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a trace cannot hold {type(value).__name__} {value!r}")


def _unwritable(path: Path, error: OSError) -> TraceError:
    reason = error.strerror or str(error)
    return TraceError(
        f"cannot write the trace in {path}: {reason}; make room or name another directory "
        "(chunks that are there are whole and can be read)"
    )
