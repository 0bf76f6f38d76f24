"""The record of a step that was read, and who gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from host_offload.control.controller import Event
from host_offload.control.step_record import SEEN, PageUse, StepRecord
from moejax.engine.statistics import demand_bytes
from moejax.requests.request import Request
from moejax.step.experts import Paging
from moejax.step.hooks import LayerTransfers

if TYPE_CHECKING:
    from moejax.engine.step_work import Step
    from moejax.step.runner import Runner


class Tracer(Protocol):
    """Gets a record of every step, and what became of budgets; see moejax.traces.tracer."""

    def after_read(self, record: StepRecord) -> None: ...

    def budget(
        self, cells: Sequence[int], kv_pages: int, *, step: int | None, settled: bool
    ) -> None: ...

    def event(self, event: Event) -> None: ...

    def mark(self, name: str) -> None: ...

    def close(self) -> None: ...


def step_record(
    step: Step,
    runner: Runner,
    paging: Paging,
    read_s: float,
    touched: Sequence[Request],
    demand: np.ndarray | None,
    use: PageUse,
) -> StepRecord:
    """What a step did to whom, once its results are there. touched: requests that got tokens or
    ended by it. paging, demand: of its output, on the host. Times are of time.perf_counter."""
    work, output, shapes = step.work, step.output, runner.shapes
    # One by one: all of it is there, and a pytree costs more than the copies.
    ids, weights, missed = (np.asarray(a) for a in (*output.routing, output.missed))
    if work.rows:
        # By row, which is the order that policies see between layers.
        by_row = sorted(work.rows, key=lambda placed: placed[0])
        place = [row for row, _ in by_row]
        requests, position = [r for _, r in by_row], step.positions[place]
        lengths, rows, phase, waves = [1] * len(place), output.logits.shape[0], 1, 1
    else:
        spans = [np.arange(c.skip, c.length) for c in work.chunks]
        place = np.concatenate([i * shapes.chunk + s for i, s in enumerate(spans)])
        position = np.concatenate([c.start + s for c, s in zip(work.chunks, spans, strict=True)])
        requests, rows = [c.request for c in work.chunks], shapes.prefill_chunks * shapes.chunk
        lengths, phase, waves = [len(s) for s in spans], 0, shapes.waves
    arrays = {}
    for name, given in output.arrays._asdict().items():
        if given is not None:
            array = np.asarray(given)
            by_token = array if name == "embedding" else array.swapaxes(0, 1)
            arrays[SEEN[name]] = by_token[place]
    number = np.array([r.number for r in requests], np.int32)
    user = np.array([-1 if r.session is None else r.session.number for r in requests], np.int32)
    return StepRecord(
        request=np.repeat(number, lengths),
        user=np.repeat(user, lengths),
        position=position.astype(np.int32),
        phase=np.full(len(place), phase, np.uint8),
        ids=ids.transpose(1, 0, 2)[place].astype(np.int16),
        weights=weights.transpose(1, 0, 2)[place],
        number=step.number,
        kind=step.kind,
        start_s=step.dispatched_s,
        read_s=read_s,
        seconds=0.0,
        rows=rows,
        compiled=step.compiled,
        hits=np.asarray(paging.hits),
        fills=np.asarray(paging.fills),
        read_through=np.asarray(paging.read_through),
        waves=np.full(len(missed), waves, np.int16),
        missed=missed,
        bytes=moved_bytes(step, paging, demand, runner.link_bytes),
        use=np.array(dataclasses.astuple(use)),
        finished=tuple(r.number for r in touched if r.finish_reason is not None),
        staged=None if output.staged is None else np.asarray(output.staged),
        **arrays,
    )


def moved_bytes(
    step: Step, paging: Paging, demand: np.ndarray | None, link_bytes: Sequence[int]
) -> np.ndarray:
    """int64[3]: bytes over the link, of fills, of experts read through, and ahead of need.
    demand: None of one version. link_bytes: of an expert, by version."""
    lists, ahead = list(step.between), 0
    if step.stages is not None and step.output.staged is not None:
        lists.append(LayerTransfers(step.stages, step.output.staged))
    for entries, done in lists:
        carried_out = np.asarray(done) > 0
        ahead += sum(link_bytes[v] for v in np.asarray(entries.version)[carried_out].tolist())
    return np.array([*demand_bytes(paging, demand, link_bytes), ahead], np.int64)
