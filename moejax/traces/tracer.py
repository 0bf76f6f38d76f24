"""Writes a trace of the engine's steps: LLM(trace=DIR), --trace DIR. See docs/trace_format.md."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.control.controller import Decided
from host_offload.control.interface import Transfer
from host_offload.control.paging import PagedSpec
from host_offload.traces.reader import (
    USES,
    Mark,
    StepTrace,
    TraceError,
    TraceHeader,
    TraceWriter,
    TransferTrace,
    require_new,
)
from host_offload.versions.layer_versions import version_bytes
from moejax.engine.records import StepRecord
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.step.programs import STAGES
from moejax.step.runner import Runner
from moejax.step.trace_arrays import TraceArrays, parse_trace_arrays

__all__ = [
    "Tracer",
    "check_trace",
    "config_digest",
    "moved_bytes",
    "start_trace",
]


BATCH = 32
"""Records that are copied at once: one by one, most of the time would go into numpy's calls."""

BATCH_BYTES = 8 << 20
"""Optional arrays of those records, at most: each may be as large as a chunk."""


class Tracer:
    """Feeds a TraceWriter from the records of steps. Owns the writer.

    record_bytes: bytes of one expert as it crosses the link, by version number. waves: passes over
    a layer's experts in a prefill step. Optional arrays that the header names must be in every
    record; others are left out. Its methods raise UserError when the trace can no longer be
    written; a step may be refused BATCH steps late. What is left at the interpreter's exit is
    written then.
    """

    def __init__(self, writer: TraceWriter, *, record_bytes: Sequence[int], waves: int = 1):
        self.writer, self._record_bytes = writer, np.asarray(record_bytes, np.int64)
        self._began = self._last_read = time.perf_counter()
        self._next_step = 0
        self._queues: dict[tuple[str, str], tuple] = {}
        """What each policy's queues were when they were last written out."""
        layers = writer.header.layers
        self._waves = {
            "prefill": np.full(layers, waves, np.int16),
            "decode": np.ones(layers, np.int16),
        }
        self._records: list[tuple[StepRecord, Any]] = []
        header = writer.header
        wanted = header.probabilities, header.gate_input, header.embedding
        self._arrays = [n for n, on in zip(TraceArrays._fields, wanted, strict=True) if on]
        self._bytes = 0
        """Of the records' optional arrays."""
        atexit.register(self.close)

    def after_read(self, record: StepRecord, use: Any = None) -> None:
        """Adds a step; keeps the record until BATCH are there, so its arrays must not change.

        use: state of KV and queue after it, an object with the attributes USES, or None where it
        is not known.
        """
        if self.writer.closed:
            raise UserError(f"the trace {self.writer.directory} is closed")
        self._records.append((record, use))
        self._next_step = record.number + 1
        self._bytes += sum(getattr(record, name).nbytes for name in self._arrays)
        if len(self._records) >= BATCH or self._bytes >= BATCH_BYTES:
            self._write_records()

    def _write_records(self) -> None:
        records, self._records, self._bytes = self._records, [], 0
        if not records:
            return
        moved = self._moved([record for record, _ in records])
        uses = np.full((len(records), len(USES)), -1)
        for i, (_, use) in enumerate(records):
            if use is not None:
                uses[i] = [getattr(use, name) for name in USES]
        steps = []
        for (record, _), count, use in zip(records, moved, uses, strict=True):
            hits, fills, read_through = record.paging[1:]
            step = StepTrace(
                request=record.request,
                user=record.user,
                position=record.position,
                phase=record.phase,
                ids=record.ids,
                weights=record.weights,
                number=record.number,
                kind=record.kind,
                start_s=record.dispatched_s - self._began,
                read_s=record.read_s - self._began,
                seconds=record.read_s - max(record.dispatched_s, self._last_read),
                rows=record.rows,
                compiled=record.compiled,
                hits=np.asarray(hits),
                fills=np.asarray(fills),
                read_through=np.asarray(read_through),
                waves=self._waves[record.kind],
                missed=record.missed,
                bytes=count,
                use=use,
                finished=record.finished,
                probabilities=record.probs if "probs" in self._arrays else None,
                gate_input=record.gate_input if "gate_input" in self._arrays else None,
                embedding=record.embedding if "embedding" in self._arrays else None,
            )
            self._last_read = record.read_s
            steps.append(step)
        try:
            self.writer.append(*steps)
        except TraceError as error:
            raise UserError(str(error)) from error

    def _moved(self, records: Sequence[StepRecord]) -> np.ndarray:
        """Bytes over the link, int64[records, 3], by the header's causes."""
        experts = np.zeros((len(records), 3), np.int64)
        if records[0].demand is not None:
            demand = np.stack([record.demand for record in records])  # type: ignore[arg-type]
            experts[:, :2] = demand.sum(axis=1, dtype=np.int64) @ self._record_bytes
        else:
            for i, name in enumerate(("fills", "read_through")):
                counts = np.concatenate([getattr(record.paging, name) for record in records])
                experts[:, i] = counts.reshape(len(records), -1).sum(axis=1)
            experts *= self._record_bytes[0]
        experts[:, 2] = [record.staged_bytes for record in records]
        return experts

    def transfers(self, transfers: Iterable[Transfer]) -> None:
        """Adds transfers, each once: when it was used, evicted or skipped, or at the end."""
        try:
            for each in transfers:
                fields = (getattr(each, name) for name in TransferTrace._fields)
                self.writer.transfer(TransferTrace(*fields))
        except TraceError as error:
            raise UserError(str(error)) from error

    def decision(self, step: int, fields: Mapping[str, Any]) -> None:
        """Adds a line to decisions.jsonl: what was decided after reading step `step`."""
        try:
            self.writer.decision(step, fields)
        except TraceError as error:
            raise UserError(str(error)) from error

    def event(self, event: Any) -> None:
        """Adds an event of a Controller's log: a policy's decision, or a transfer's fate."""
        if not isinstance(event, Decided):
            self.transfers([event])
            return
        values = vars(event.decision).items()
        wanted = {name: value for name, value in values if value is not None}
        for name in ("stages", "transitions"):
            # Thousands of entries; most policies want the same ones for many steps.
            if name in wanted and self._queues.get((event.policy, name)) == wanted[name]:
                wanted[name] = "as before"
            elif name in wanted:
                self._queues[event.policy, name] = wanted[name]
        fields = {"moment": event.moment.name, "policy": event.policy, "decision": wanted}
        self.decision(event.step, fields)

    def budget(
        self, cells: Sequence[int], kv_pages: int, *, step: int | None, settled: bool
    ) -> None:
        """Adds a line to decisions.jsonl: the layers have so many cells and KV so many pages from
        `step` on; None: from the next step on, without a policy. settled: a policy's
        request has its end with that."""
        moved = {"cells": list(map(int, cells)), "kv_pages": kv_pages}
        moved |= {"settled": settled, "by_hand": step is None}
        self.decision(self._next_step if step is None else step, {"budget": moved})

    def mark(self, name: str) -> None:
        """Names the moment: what follows belongs to it (a warm-up's end, another workload)."""
        mark = Mark(self._next_step, time.perf_counter() - self._began, name)
        try:
            self.writer.mark(mark)
        except TraceError as error:
            raise UserError(str(error)) from error

    def close(self) -> None:
        """Completes the trace. Idempotent. Raises UserError for what could not be written, unless
        it has been said."""
        atexit.unregister(self.close)
        try:
            if self.writer.failure is None:
                self._write_records()
        finally:
            try:
                self.writer.close()
            except TraceError as error:
                raise UserError(str(error)) from error


def check_trace(
    directory: str | os.PathLike[str] | None, arrays: str | Iterable[str]
) -> frozenset[str]:
    """The optional arrays to record, of parse_trace_arrays. Raises UserError unless a trace could
    be written there; None: no trace, which has no arrays."""
    wanted = parse_trace_arrays(arrays)
    if directory is None:
        if wanted:
            raise UserError(
                "trace_arrays (--trace-arrays) are a part of a trace; name its directory with "
                "trace (--trace DIR)"
            )
        return wanted
    try:
        require_new(directory)
    except TraceError as error:
        raise UserError(str(error)) from error
    return wanted


def start_trace(
    directory: str | os.PathLike[str],
    runner: Runner,
    *,
    dtype: str,
    seed: int,
    settings: Mapping[str, Any],
    arrays: frozenset[str] = frozenset(),
) -> Tracer:
    """A Tracer into a new directory.

    settings: what else decided the run (eviction, budgets), for people; kept as they are. arrays:
    of TRACE_ARRAYS, those to record; the runner must give them out. Raises UserError for a
    directory that is not new or cannot be written.
    """
    config, layout, shapes = runner.config, runner.layout, runner.shapes
    cells = np.sum(np.asarray(runner.tables.cell_row) >= 0, axis=1)
    moved = moved_bytes(runner)
    spec = {
        "layers": sum(config.moe_layers),
        "experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "hidden": config.hidden_size,
        "dtype": dtype,
        "version_bytes": {v: _number(sizes) for v, sizes in runner.version_bytes.items()},
        "link_bytes": None if moved is None else {v: _number(n) for v, n in moved.items()},
        "page_bytes": layout.page.nbytes,
        "page_tokens": layout.page.block_size,
        "slot_bytes": layout.slot_bytes,
        "slots": runner.slots,
        "cells": cells.tolist(),
        "stage_entries": STAGES,
        "resident": None if runner.placement is None else runner.placement.resident.said,
        "paged": _paged(runner),
        "seed": seed,
        "shapes": dataclasses.asdict(shapes),
        **settings,
    }
    header = TraceHeader(
        layers=sum(config.moe_layers),
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        config_digest=config_digest(config),
        spec=spec,
        machine=_machine(runner.device),
        command=sys.argv,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        probabilities="probs" in arrays,
        gate_input=config.hidden_size if "gate_input" in arrays else 0,
        embedding=config.hidden_size if "embedding" in arrays else 0,
    )
    try:
        writer = TraceWriter(directory, header)
    except TraceError as error:
        raise UserError(str(error)) from error
    return Tracer(writer, record_bytes=runner.link_bytes, waves=shapes.waves)


def config_digest(config: ModelConfig) -> str:
    """Names a model's configuration: SHA-256 of its fields as JSON with sorted keys, in hex."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _number(sizes: np.ndarray) -> int | list[int]:
    """Bytes of an expert: one number, or one of each layer where layers differ."""
    return int(sizes[0]) if np.all(sizes == sizes[0]) else sizes.tolist()


def moved_bytes(runner: Runner) -> dict[str, np.ndarray] | None:
    """Version → int64[L]: bytes of an expert over the link; None where they are those of a cell."""
    layers = runner.tables.address.shape[0]
    moved = version_bytes(runner.layout, runner.formats, runner.link_bytes, layers)
    same = all(np.array_equal(moved[name], n) for name, n in runner.version_bytes.items())
    return None if same else moved


def _paged(runner: Runner) -> dict[str, Any] | None:
    """The cells of each version and what misses fill, where experts are paged in several."""
    if len(runner.version_bytes) == 1 or runner.placement is not None:
        return None
    versions = runner.layer_versions
    tables = runner.tables if versions is None else versions.seen(runner.tables)
    version = np.where(np.asarray(tables.cell_row) >= 0, np.asarray(tables.cell_version), -1)
    cells = [np.sum(version == v, axis=1) for v in range(len(runner.layout.records))]
    return PagedSpec(np.stack(cells, axis=1), np.asarray(tables.fill_version)).said


def _machine(device: jax.Device) -> dict[str, Any]:
    return {
        "device": device.device_kind,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
