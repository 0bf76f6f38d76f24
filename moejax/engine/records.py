"""What a step did, read back by the host: the input of controllers and trace writers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moejax.requests.request import Request
from moejax.step.experts import Paging
from moejax.step.hooks import LayerTransfers

if TYPE_CHECKING:
    from moejax.engine.step_work import Step
    from moejax.step.runner import Runner


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step whose results were read, one step late. N real tokens (no padding), L MoE layers,
    k experts a token, E experts a layer."""

    number: int
    kind: str
    """`prefill` or `decode`."""
    dispatched_s: float
    """Of time.perf_counter."""
    read_s: float
    rows: int
    """Token rows of the executable, padding included: the bucket in decode, the prefill step's in
    prefill."""
    compiled: bool
    """The step was the first to run its executable."""
    request: np.ndarray
    """int32[N]: number of the token's request."""
    user: np.ndarray
    """int32[N]: number of its session, −1 without one."""
    position: np.ndarray
    """int32[N]: place in its sequence."""
    phase: np.ndarray
    """uint8[N]: 0 prompt, 1 generated."""
    ids: np.ndarray
    """int16[N, L, k]: routed experts, ascending."""
    weights: np.ndarray
    """float32[N, L, k]."""
    paging: Paging
    """int32[L] each."""
    missed: np.ndarray
    """bool[L, E]: active experts that were not resident."""
    staged: np.ndarray | None
    """int32[S]: 1 for each entry of the step's stage list that was carried out; None without."""
    staged_bytes: int
    """Moved ahead of need, by that list and between layers."""
    finished: tuple[int, ...]
    """Numbers of requests that ended with this step's results."""
    probs: np.ndarray | None = None
    """float16[N, L, E], where the step gave it out: see trace_arrays.TraceArrays."""
    gate_input: np.ndarray | None = None
    """float16[N, L, D]."""
    embedding: np.ndarray | None = None
    """float16[N, D]."""
    demand: np.ndarray | None = None
    """int32[L, 2, V]: fills and experts read through by version; None of one version."""


def step_record(
    step: Step,
    runner: Runner,
    paging: Paging,
    read_s: float,
    touched: Sequence[Request],
    demand: np.ndarray | None = None,
) -> StepRecord:
    """What a step did to whom, once its results are there. touched: requests that got tokens or
    ended by it. paging, demand: of its output, on the host."""
    work, output, shapes = step.work, step.output, runner.shapes
    # One by one: all of it is there, and a pytree costs more than the copies.
    ids, weights, missed = (np.asarray(a) for a in (*output.routing, output.missed))
    lengths = None
    if work.rows:
        # By row, which is the order that policies see between layers.
        by_row = sorted(work.rows, key=lambda placed: placed[0])
        place = [row for row, _ in by_row]
        requests, position = [r for _, r in by_row], step.positions[place]
        rows, phase = output.logits.shape[0], 1
    else:
        spans = [np.arange(c.skip, c.length) for c in work.chunks]
        place = np.concatenate([i * shapes.chunk + s for i, s in enumerate(spans)])
        position = np.concatenate([c.start + s for c, s in zip(work.chunks, spans, strict=True)])
        requests, rows = [c.request for c in work.chunks], shapes.prefill_chunks * shapes.chunk
        lengths, phase = [len(s) for s in spans], 0
    given = {n: np.asarray(a) for n, a in output.arrays._asdict().items() if a is not None}
    arrays = {
        name: array[place] if name == "embedding" else array[:, place].swapaxes(0, 1)
        for name, array in given.items()
    }
    number = np.array([r.number for r in requests], np.int32)
    user = np.array([-1 if r.session is None else r.session.number for r in requests], np.int32)
    if lengths is not None:
        number, user = np.repeat(number, lengths), np.repeat(user, lengths)
    return StepRecord(
        number=step.number,
        kind=step.kind,
        dispatched_s=step.dispatched_s,
        read_s=read_s,
        rows=rows,
        compiled=step.compiled,
        request=number,
        user=user,
        position=position.astype(np.int32),
        phase=np.full(len(place), phase, np.uint8),
        ids=ids.transpose(1, 0, 2)[place].astype(np.int16),
        weights=weights.transpose(1, 0, 2)[place],
        paging=paging,
        missed=missed,
        staged=None if output.staged is None else np.asarray(output.staged),
        staged_bytes=_staged_bytes(step, runner.link_bytes),
        finished=tuple(r.number for r in touched if r.finish_reason is not None),
        demand=demand,
        **arrays,
    )


def _staged_bytes(step: Step, link_bytes: Sequence[int]) -> int:
    """link_bytes: of an expert over the link, by version."""
    lists = list(step.between)
    if step.stages is not None and step.output.staged is not None:
        lists.append(LayerTransfers(step.stages, step.output.staged))
    moved = 0
    for entries, done in lists:
        carried_out = np.asarray(done) > 0
        moved += sum(link_bytes[v] for v in np.asarray(entries.version)[carried_out].tolist())
    return moved
