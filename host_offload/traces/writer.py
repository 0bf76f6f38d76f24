"""Writes traces: steps are copied into arrays, a background thread turns full ones into files."""

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
from host_offload.traces.progress import ProgressTrace, encoded
from host_offload.traces.schema import (
    BITS,
    FORMAT,
    KINDS,
    TRANSFER_TYPES,
    VERSION,
    Mark,
    TraceError,
    TraceHeader,
    TransferTrace,
    chunk_name,
    columns,
)

MAX_EVENTS = 10_000
"""Most decisions, transfers, looks at them or marks that wait for a chunk: steps may be few and
these many."""


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
    """Writes a trace. `append` copies into arrays that were allocated before; a full chunk is
    written by a background thread while the next one fills, and a third waits for the first, so
    memory is two chunks of about chunk_bytes (or of one step, where that is larger).

    Raises TraceError where the directory is not new or cannot be written. A chunk that could not be
    written is raised by the next call, and by `close` if none came. What is left at the
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
        self._buffer, self._spare = self._new_buffer(), self._new_buffer()
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

    def append(self, *steps: StepRecord) -> None:
        """Adds steps; copies everything. Several at once cost much less than one by one. Raises
        ValueError, adding none, where an array is not of the header's shapes."""
        routed = (self.header.layers, self.header.top_k)
        sizes = [len(step.user) for step in steps]
        names = [name for name in ("ids", "weights") if f"token.{name}" in self._columns]
        for step, n in zip(steps, sizes, strict=True):
            shapes = {name: getattr(step, name).shape for name in names}
            if set(shapes.values()) != {(n, *routed)}:
                found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
                raise ValueError(f"{found} of a step of {n} tokens must be {(n, *routed)}")
        buffer, begin = self._ready(), 0
        while begin < len(steps):
            end, tokens = begin, buffer.tokens
            rows = begin + buffer.step_rows - buffer.steps
            while end < min(len(steps), rows) and tokens + sizes[end] <= buffer.token_rows:
                tokens += sizes[end]
                end += 1
            buffer.put(steps[begin:end], sizes[begin:end])
            if end < len(steps):
                if buffer.steps:
                    buffer = self._hand_over()
                if sizes[end] > buffer.token_rows:
                    buffer = self._buffer = self._new_buffer(sizes[end])
            begin = end

    def transfer(self, transfer: TransferTrace) -> None:
        """Adds a transfer whose fate is known."""
        self._event(self._ready().transfers, transfer)

    def progress(self, seen: ProgressTrace) -> None:
        """Adds what policies were shown of transfers beside compute."""
        self._event(self._ready().progress, seen)

    def mark(self, mark: Mark) -> None:
        """Adds a named moment."""
        self._event(self._ready().marks, mark)

    def decision(self, step: int, fields: Mapping[str, Any]) -> None:
        """Adds a line to decisions.jsonl: {"step": step, **fields}; numpy arrays become lists.
        Raises TypeError for what JSON cannot hold."""
        line = json.dumps({"step": step, **fields}, default=_plain)
        self._event(self._ready().decisions, line)

    def close(self) -> None:
        """Writes what is left and marks the trace as complete. Idempotent. Raises TraceError where
        something could not be written and no call has said so."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        try:
            if self.failure is None:
                self._settle()
                try:
                    # Not by the thread: at the interpreter's exit it takes no more work.
                    if not self._buffer.empty:
                        self._write(self._buffer, self._chunks)
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

    def _new_buffer(self, tokens: int = 0) -> _Buffer:
        """Room for chunk_bytes of tokens, or of `tokens` where that is more."""
        sizes = {"token": 0, "step": 0}
        for name, (dtype, shape) in self._columns.items():
            sizes[name.split(".")[0]] += dtype.itemsize * int(np.prod(shape))
        rows = max(self._chunk_bytes // (sizes["token"] + sizes["step"]), 1)
        return _Buffer(self._columns, steps=rows, tokens=max(rows, tokens))

    def _ready(self) -> _Buffer:
        if self.closed:
            raise TraceError(f"the trace {self.directory} is closed")
        if self.failure is not None:
            raise self.failure
        if self._pending is not None and self._pending.done():
            self._settle()
        return self._buffer

    def _event(self, events: list, event: Any) -> None:
        events.append(event)
        if len(events) >= MAX_EVENTS:
            self._hand_over()

    def _hand_over(self) -> _Buffer:
        """Gives the chunk to the thread, which must be done with the one before."""
        self._settle()
        self._pending = self._pool.submit(self._write, self._buffer, self._chunks)
        self._chunks += 1
        self._buffer, self._spare = self._spare, self._buffer
        self._buffer.clear()
        return self._buffer

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

    def _write(self, buffer: _Buffer, number: int) -> None:
        if buffer.decisions:
            with open(self.directory / "decisions.jsonl", "a") as file:
                file.write("".join(line + "\n" for line in buffer.decisions))
        # First under another name, so that no reader sees half a chunk.
        _replace(self.directory / chunk_name(number), buffer.encode(self._id, number))
        self._steps += buffer.steps
        self._tokens += buffer.tokens

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


class _Buffer:
    """The rows of one chunk."""

    def __init__(
        self, columns: Mapping[str, tuple[np.dtype, tuple[int, ...]]], steps: int, tokens: int
    ):
        self.step_rows, self.token_rows = steps, tokens
        rows = {"token": tokens, "step": steps}
        self.arrays = {
            name: np.empty((rows[name.split(".")[0]], *shape), dtype)
            for name, (dtype, shape) in columns.items()
        }
        field = {name: i for i, name in enumerate(StepRecord._fields)}
        self.token_arrays, self.vectors, self.scalars = [], [], []
        for name, array in self.arrays.items():
            if name in ("step.kind", "step.tokens") or name.removeprefix("step.") in BITS:
                continue
            where = self.vectors if array.ndim > 1 else self.scalars
            where = self.token_arrays if name.startswith("token.") else where
            where.append((array, field[name.split(".")[1]]))
        self.clear()

    def clear(self) -> None:
        self.steps = self.tokens = 0
        self.finished: list[tuple[int, int]] = []
        self.transfers: list[TransferTrace] = []
        self.progress: list[ProgressTrace] = []
        self.marks: list[Mark] = []
        self.decisions: list[str] = []

    def put(self, steps: Sequence[StepRecord], sizes: Sequence[int]) -> None:
        """Copies steps of so many tokens, which must have room."""
        if not steps:
            return
        begin, first = self.tokens, self.steps
        end, last = begin + sum(sizes), first + len(steps)
        span = slice(first, last)
        for arrays, rows in ((self.token_arrays, slice(begin, end)), (self.vectors, span)):
            for array, field in arrays:
                parts: list[Any] = [step[field] for step in steps]
                # One after another, whether a part is a step's tokens or its one row.
                np.concatenate(parts, out=array[rows].reshape(-1, *parts[0].shape[1:]))
        for array, field in self.scalars:
            array[span] = [step[field] for step in steps]
        if "step.kind" in self.arrays:
            self.arrays["step.kind"][span] = [KINDS.index(step.kind) for step in steps]
        for name in BITS:
            if f"step.{name}" in self.arrays:
                bits = np.stack([getattr(step, name) for step in steps])
                packed = np.packbits(bits, axis=2, bitorder="little")
                self.arrays[f"step.{name}"][span] = packed
        self.arrays["step.tokens"][span] = sizes
        self.finished += [(step.number, request) for step in steps for request in step.finished]
        self.tokens, self.steps = end, last

    @property
    def empty(self) -> bool:
        events = self.transfers, self.progress, self.marks, self.decisions
        return not (self.steps or any(events))

    def encode(self, trace: str, number: int) -> bytes:
        """The chunk as safetensors."""
        used = {"token": self.tokens, "step": self.steps}
        arrays = {name: array[: used[name.split(".")[0]]] for name, array in self.arrays.items()}
        finished = np.asarray(self.finished, np.int64).reshape(-1, 2)
        arrays["finish.step"] = np.ascontiguousarray(finished[:, 0])
        arrays["finish.request"] = np.ascontiguousarray(finished[:, 1])
        causes = list(dict.fromkeys(t.cause for t in self.transfers))
        for name, dtype in TRANSFER_TYPES.items():
            values = [getattr(transfer, name) for transfer in self.transfers]
            values = [causes.index(cause) for cause in values] if name == "cause" else values
            arrays[f"transfer.{name}"] = np.asarray(values, dtype)
        seen, seen_causes = encoded(self.progress)
        arrays |= seen
        metadata = {
            "format": FORMAT,
            "trace": trace,
            "chunk": str(number),
            "steps": str(self.steps),
            "tokens": str(self.tokens),
            "transfer_causes": json.dumps(causes),
            "progress_causes": json.dumps(seen_causes),
            "marks": json.dumps(self.marks),
        }
        return save(arrays, metadata)


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
