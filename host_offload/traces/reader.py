"""Traces: what the steps of an engine routed, missed and moved, as files.

docs/reference/trace_format.md describes them.

A trace is a directory: `trace.json` says once what holds for all of it, each
`chunk-*.safetensors` has whole steps as arrays, and files of JSON lines have what happened beside
them: `decisions`, `transfers`, `link` and `marks`. A chunk appears under its name when it is
complete, so a reader never sees half a chunk and a crash costs the newest only. This file reads
them; nothing is read before it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from host_offload.control.interface import Moment
from host_offload.control.step_record import USES, LinkUse, StepRecord
from host_offload.traces.link import LinkTrace
from host_offload.traces.schema import (
    BITS,
    FORMAT,
    KINDS,
    QUEUES,
    VERSION,
    BudgetMove,
    Mark,
    TraceError,
    TraceHeader,
    TransferTrace,
    chunk_name,
    columns,
)

MOST_LINE = 64 << 20
"""Bytes of trace.json, and of a line of another file. More of them are damage."""
_CHUNK = re.compile(r"chunk-(\d{6,})\.safetensors")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Whole steps of a trace, in one file that is mapped into memory at first use."""

    path: Path
    number: int
    trace_id: str
    header: TraceHeader

    @property
    def steps(self) -> int:
        return int(self._file[1]["steps"])

    @property
    def tokens(self) -> int:
        return int(self._file[1]["tokens"])

    def array(self, name: str) -> np.ndarray:
        """Returns one array, such as "token.ids" int16[N, L, k]; reads no other. Raises KeyError
        for a name that is not in the chunk, TraceError for one that the whole trace lacks."""
        if name in self.header.absent:
            raise TraceError(
                f"{self.path.parent} has no {name}: it was converted or generated; what needs it "
                "needs a trace that an engine wrote (--trace DIR)"
            )
        file = self._file[0]
        if name not in file.keys():  # noqa: SIM118 (not a mapping)
            raise KeyError(f"{name} is not in {self.path.name}; it has {', '.join(file.keys())}")
        return file.get_tensor(name)

    def step_traces(self) -> Iterator[StepRecord]:
        """Yields the steps in order; their arrays are views of the chunk's."""
        arrays = {name: self.array(name) for name in columns(self.header)}
        token, step, draft = (
            {n.split(".")[1]: a for n, a in arrays.items() if n.startswith(f"{per}.")}
            for per in ("token", "step", "draft")
        )
        for name in {*BITS} & step.keys():
            step[name] = np.unpackbits(
                step[name], axis=2, count=self.header.experts, bitorder="little"
            ).astype(bool)
        if "use" in step:
            step["use"] = _in_order(step["use"], self.header.uses)
        absent = {name.split(".")[1]: None for name in self.header.absent}
        ended = dict(json.loads(self._file[1]["finished"]))
        ends = np.cumsum(counts := step.pop("tokens"), dtype=np.int64).tolist()
        if (routed := len(token["ids"])) != (ends[-1] if ends else 0) or (counts < 0).any():
            raise TraceError(
                f"{self.path}: the steps have {ends[-1] if ends else 0} tokens, {routed} were "
                "routed; copy the trace again"
            )
        drafted = np.cumsum(step.pop("drafts", np.zeros_like(counts)), dtype=np.int64).tolist()
        for i, end in enumerate(ends):
            begin = ends[i - 1] if i else 0
            fields: dict[str, Any] = dict(absent)
            fields |= {name: array[begin:end] for name, array in token.items()}
            first = drafted[i - 1] if i else 0
            fields |= {name: array[first : drafted[i]] for name, array in draft.items()}
            for name, array in step.items():
                fields[name] = array[i] if array.ndim > 1 else array[i].item()
            if "kind" in step:
                fields["kind"] = KINDS[fields["kind"]]
            fields["finished"] = tuple(ended.get(fields["number"], ()))
            yield StepRecord(**fields)

    @functools.cached_property
    def _file(self) -> tuple[Any, dict[str, str]]:
        """Returns (the open file, its metadata), checked against the trace's header."""
        try:
            file = safe_open(self.path, framework="numpy")
        except FileNotFoundError:
            raise self._error("is missing") from None
        except (SafetensorError, OSError) as error:
            raise self._error(f"is damaged or cut short ({error})") from error
        metadata = file.metadata() or {}
        if metadata.get("trace") != self.trace_id or metadata.get("chunk") != str(self.number):
            raise self._error("belongs to another trace or was renamed")
        for name, (dtype, row) in columns(self.header).items():
            rows = int(metadata[f"{name.split('.')[0]}s"])
            kind = "BOOL" if dtype == np.bool_ else f"{dtype.kind.upper()}{8 * dtype.itemsize}"
            wanted = kind, [rows, *row]  # as safetensors says it
            if name not in file.keys():  # noqa: SIM118 (not a mapping)
                raise self._error(f"lacks {name}")
            part = file.get_slice(name)
            found = part.get_dtype(), list(part.get_shape())
            if found != wanted:
                raise self._error(
                    f"has {name} as {found[0]}{found[1]}, trace.json says {dtype.name}{wanted[1]}"
                )
        return file, metadata

    def _error(self, what: str) -> TraceError:
        return TraceError(
            f"{self.path}: the chunk {what}; copy the trace again, or read the chunks before it: "
            f"read_trace(…).chunks[:{self.number}]"
        )


@dataclasses.dataclass(frozen=True)
class Trace:
    """An open trace. Its header is read; chunks are read when they are used.

    - `complete`: whether the run was closed in order. Otherwise (a crash, or a run that continues)
      chunks hold all that was written up to some step.
    """

    directory: Path
    header: TraceHeader
    complete: bool
    chunks: tuple[Chunk, ...]

    @property
    def steps(self) -> int:
        return sum(chunk.steps for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def step_traces(self) -> Iterator[StepRecord]:
        """Yields all steps in order, with one chunk in memory."""
        for chunk in self.chunks:
            yield from chunk.step_traces()

    def array(self, name: str) -> np.ndarray:
        """Returns one array of all chunks together, such as "token.ids" or "step.seconds"."""
        if not self.chunks:
            raise TraceError(f"the trace {self.directory} has no chunk yet")
        return np.concatenate([chunk.array(name) for chunk in self.chunks])

    def transfers(self) -> Iterator[TransferTrace]:
        """Yields all transfers, in the order in which their fate became known. Raises TraceError
        like decisions."""
        return (TransferTrace(*line) for line in self._lines("transfers"))

    def link(self) -> Iterator[LinkTrace]:
        """Yields all that policies saw, between layers, of the queue of transfers beside compute,
        in its order. Raises TraceError like decisions."""
        for step, moment, layer, *use in self._lines("link"):
            yield LinkTrace(step, Moment(moment), layer, LinkUse(*use))

    def marks(self) -> tuple[Mark, ...]:
        """Returns all marks, in order. Raises TraceError like decisions."""
        return tuple(Mark(*line) for line in self._lines("marks"))

    def budgets(self) -> tuple[BudgetMove, ...]:
        """Returns every budget that was carried out, in order. Raises TraceError like decisions."""
        lines = [{"step": x["step"], **x["budget"]} for x in self.decisions() if "budget" in x]
        return tuple(BudgetMove(**{**line, "cells": tuple(line["cells"])}) for line in lines)

    def decisions(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of decisions.jsonl, of policies, of budgets and of the length of drafts.
        Raises TraceError for a line that is not JSON."""
        return self._lines("decisions")

    def _lines(self, name: str) -> Iterator[Any]:
        """Yields the lines of a file, without the half line of a run that crashed."""
        path = self.directory / f"{name}.jsonl"
        if not path.exists():
            return
        with _open_file(path) as file:
            for number in itertools.count(1):
                line = file.readline(MOST_LINE)
                if not line or not (line.endswith(b"\n") or self.complete):
                    return
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TraceError(f"{path}, line {number}: not JSON ({error})") from error
                yield found

    def policy_decisions(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of policies alone. Every queue that is "as before" is written out."""
        queues: dict[tuple[str, str], Any] = {}
        for line in self.decisions():
            if "budget" in line or "drafts" in line:
                continue
            decision = dict(line.get("decision", {}))
            for name in QUEUES & decision.keys():
                place = line.get("policy", ""), name
                if decision[name] == "as before":
                    decision[name] = queues[place]
                queues[place] = decision[name]
            yield {**line, "decision": decision}


def _in_order(use: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the uses of a trace whose columns have these names, int64[T, len(USES)]; −1 for
    missing columns."""
    found = np.full((len(use), len(USES)), -1, use.dtype)
    for i, name in enumerate(USES):
        if name in names:
            found[:, i] = use[:, list(names).index(name)]
    return found


def _open_file(path: Path) -> BinaryIO:
    """Opens a file of a trace. Raises OSError, and TraceError for a pipe, which would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TraceError(f"{path} is not a regular file; copy the trace again")
    return open(descriptor, "rb")


def read_trace(directory: str | os.PathLike[str]) -> Trace:
    """Opens a trace without reading its chunks.

    Raises TraceError for a directory that is no trace, or one of another version. A chunk that is
    missing, damaged or of another trace raises TraceError, with its name, when it is used.
    """
    directory = Path(directory)
    path = directory / "trace.json"
    try:
        with _open_file(path) as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, MOST_LINE))
        found = json.loads(text)
    except OSError as error:
        raise TraceError(
            f"{directory} is no trace: cannot read trace.json ({error.strerror}); "
            "give the directory that --trace wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged ({error}); copy the trace again") from error
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise TraceError(f"{path} is not of a moejax trace; give the directory that --trace wrote")
    if (version := found.get("version")) != VERSION:
        raise TraceError(
            f"{path}: format version {version}, this moejax reads {VERSION}; read it with the "
            "moejax that wrote it"
        )
    try:
        said = {"rejected": False, "token": False, **found}
        header = TraceHeader(**{f.name: said[f.name] for f in dataclasses.fields(TraceHeader)})
        identity, complete = found["id"], found["complete"]
        count = None if complete is None else int(complete["chunks"])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is damaged ({error!r}); copy the trace again") from error
    if count is None:
        numbers = [int(m[1]) for f in directory.iterdir() if (m := _CHUNK.fullmatch(f.name))]
        count = max(numbers, default=-1) + 1
    chunks = (Chunk(directory / chunk_name(i), i, identity, header) for i in range(count))
    return Trace(directory, header, complete is not None, tuple(chunks))
