"""Writes a trace of the engine's steps: LLM(trace=DIR), --trace DIR.

See docs/reference/trace_format.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.control.controller import Decided, Event, Observed
from host_offload.control.interface import Spec
from host_offload.control.paging import PagedSpec
from host_offload.control.step_record import COLUMNS, StepRecord
from host_offload.traces.link import LinkTrace
from host_offload.traces.schema import QUEUES, SAID, Mark, TraceError, TraceHeader, TransferTrace
from host_offload.traces.writer import TraceWriter, require_new
from moejax.errors import user_errors
from moejax.models.model_config import config_digest
from moejax.step.executor import Executor
from moejax.step.step_parts import check_trace_arrays


class Tracer:
    """Feeds a TraceWriter from the records of steps. Owns the writer.

    Optional arrays that the header names must be in every record; others are left out. Its methods
    raise UserError when the trace can no longer be written; the error may come some steps late.
    What is left at the interpreter's exit is written then.
    """

    def __init__(self, writer: TraceWriter):
        self.writer = writer
        self._began = self._last_read = time.perf_counter()
        self._next_step = 0
        self._queues: dict[tuple[str, str], tuple] = {}
        """Each policy's queues when they were last written out."""
        optional = [name for name, column in COLUMNS.items() if column.optional]
        self._dropped = dict.fromkeys(n for n in optional if not getattr(writer.header, n))

    @user_errors(TraceError)
    def after_read(self, record: StepRecord) -> None:
        """Adds a step, whose arrays must not change."""
        self._next_step = record.number + 1
        seconds = record.read_s - max(record.start_s, self._last_read)
        self._last_read = record.read_s
        times = {"start_s": record.start_s - self._began, "read_s": record.read_s - self._began}
        self.writer.append(record._replace(seconds=seconds, **times, **self._dropped))

    @user_errors(TraceError)
    def event(self, event: Event) -> None:
        """Adds an event of a Controller's log: a policy's decision, as a line of decisions.jsonl;
        what the policy saw of the queue beside compute; or a transfer, once: when it was used,
        evicted or skipped, or at the end."""
        if isinstance(event, Observed):
            self.writer.link(LinkTrace(event.step, event.moment, event.layer, event.link))
            return
        if not isinstance(event, Decided):
            fields = (getattr(event, name) for name in TransferTrace._fields)
            self.writer.transfer(TransferTrace(*fields))
            return
        values = vars(event.decision).items()
        wanted = {name: value for name, value in values if value is not None}
        for name in QUEUES & wanted.keys():
            # Thousands of entries; most policies want the same ones for many steps.
            queue, place = wanted[name], (event.policy, name)
            if self._queues.get(place) == queue:
                wanted[name] = "as before"
            self._queues[place] = queue
        if event.decision.map_rows is not None:
            # The maps themselves are probabilities of earlier steps.
            wanted["map_rows"] = event.decision.map_rows.place
        fields = {"moment": event.moment.name, "policy": event.policy, "decision": wanted}
        self.writer.decision(event.step, fields)

    @user_errors(TraceError)
    def budget(
        self, cells: Sequence[int], kv_pages: int, *, step: int | None, settled: bool
    ) -> None:
        """Adds a line to decisions.jsonl with the cells of layers and the pages of KV from `step`
        on.

        - `step`: None: from the next step on, without a policy.
        - `settled`: whether this completes a policy's request.
        """
        moved = {"cells": list(map(int, cells)), "kv_pages": kv_pages}
        moved |= {"settled": settled, "by_hand": step is None}
        self.writer.decision(self._next_step if step is None else step, {"budget": moved})

    @user_errors(TraceError)
    def add_drafts(self, step: int, said: str) -> None:
        """Adds a line to decisions.jsonl: how long drafts are after that step was read, and why."""
        self.writer.decision(step, {"drafts": said})

    @user_errors(TraceError)
    def mark(self, name: str) -> None:
        """Marks this moment with a name, which what follows belongs to (a warm-up's end, another
        workload)."""
        self.writer.mark(Mark(self._next_step, time.perf_counter() - self._began, name))

    @user_errors(TraceError)
    def close(self) -> None:
        """Completes the trace. Idempotent. Raises UserError if something could not be written and
        no call has said so yet."""
        self.writer.close()


@user_errors(TraceError)
def check_trace(directory: str | os.PathLike[str], arrays: Iterable[str]) -> frozenset[str]:
    """Returns the optional arrays to record (check_trace_arrays). Raises UserError unless a trace
    could be written there."""
    wanted = check_trace_arrays(arrays)
    require_new(directory)
    return wanted


@user_errors(TraceError)
def start_trace(
    directory: str | os.PathLike[str],
    runner: Executor,
    spec: Spec,
    *,
    settings: Mapping[str, Any],
    arrays: frozenset[str] = frozenset(),
) -> Tracer:
    """Returns a Tracer into a new directory.

    - `spec`: the engine as policies see it.
    - `settings`: what else decided the run (eviction, budgets), for people; kept unchanged.
    - `arrays`: those of RECORDED_ARRAYS to record; the runner must give out those of steps.

    Raises UserError for a directory that is not new or cannot be written.
    """
    config, moved = runner.config, runner.moved_bytes()
    cells = np.sum(np.asarray(runner.tables.cell_row) >= 0, axis=1)
    sizes: dict[str, Any] = {n: getattr(spec, n) for n in ("layers", "experts", "top_k")}
    said = {
        **sizes,
        **{name: getattr(spec, name) for name in SAID},
        "dtype": runner.steps.dtype,
        "version_bytes": {v: _number(sizes) for v, sizes in runner.version_bytes.items()},
        "link_bytes": None if moved is None else {v: _number(n) for v, n in moved.items()},
        "slots": runner.slots,
        "cells": cells.tolist(),
        "resident": None if runner.placement is None else runner.placement.resident.said,
        "paged": _describe_pages(runner),
        "shapes": dataclasses.asdict(runner.shapes),
        **settings,
    }
    header = TraceHeader(
        **sizes,
        config_digest=config_digest(config),
        spec=said,
        machine={
            "device": runner.device.device_kind,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        command=sys.argv,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        probabilities="probs" in arrays,
        gate_input=config.hidden_size if "gate_input" in arrays else 0,
        embedding=config.hidden_size if "embedding" in arrays else 0,
        placed=runner.steps.second is not None,
        rejected=runner.steps.drafts,
        token="token" in arrays,
    )
    return Tracer(TraceWriter(directory, header))


def _number(sizes: np.ndarray) -> int | list[int]:
    """Returns the bytes of an expert: one number, or a list by layer if layers differ."""
    return int(sizes[0]) if np.all(sizes == sizes[0]) else sizes.tolist()


def _describe_pages(runner: Executor) -> dict[str, Any] | None:
    """Returns the cells of each version and the version that misses fill, if experts are paged in
    several."""
    if len(runner.version_bytes) == 1 or runner.placement is not None:
        return None
    tables = runner.seen(runner.tables)
    version = np.where(np.asarray(tables.cell_row) >= 0, np.asarray(tables.cell_version), -1)
    cells = [np.sum(version == v, axis=1) for v in range(len(runner.layout.records))]
    return PagedSpec(np.stack(cells, axis=1), np.asarray(tables.fill_version)).said
