"""What a trace's steps need: for each step and layer the set of experts that were routed to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.control.step_record import StepRecord
from host_offload.traces.reader import Chunk, Trace
from host_offload.traces.schema import TraceError, TraceHeader

BLOCK_BYTES = 4 << 20
"""Bytes of the step sets that are made together."""


class StepSet(NamedTuple):
    """What one step needs."""

    number: int
    kind: int
    """Index into KINDS; −1 where the trace does not know."""
    waves: int
    """Passes over a layer's experts."""
    tokens: int
    active: np.ndarray
    """bool[L, E]"""


def read_step_sets(trace: Trace, *, user: int | None = None) -> Iterator[StepSet]:
    """All steps of a trace in order. user: only what that user's tokens (token.user) were routed
    to; other steps are empty. Raises TraceError for a chunk that cannot be read or names experts
    that the model does not have."""
    for chunk in trace.chunks:
        yield from _chunk_step_sets(chunk, trace.header, user)


def _chunk_step_sets(chunk: Chunk, header: TraceHeader, user: int | None) -> Iterator[StepSet]:
    layers, experts = header.layers, header.experts
    ids, tokens, number = map(chunk.array, ("token.ids", "step.tokens", "step.number"))
    known = {
        name: chunk.array(name) for name in ("step.kind", "step.waves") if name not in header.absent
    }
    kind = known.get("step.kind", np.full(len(tokens), -1)).astype(np.int8)
    waves = known.get("step.waves", np.ones((len(tokens), 1), np.int16))
    if tokens.sum() != len(ids) or (tokens < 0).any():
        raise TraceError(
            f"{chunk.path}: the steps have {tokens.sum()} tokens, {len(ids)} were routed; copy the "
            "trace again"
        )
    _check(f"{chunk.path}", ids, waves, experts)
    steps = max(BLOCK_BYTES // (layers * experts), 1)
    ends = np.cumsum(tokens, dtype=np.int64)
    layer = np.arange(layers)[:, None]
    for first in range(0, len(tokens), steps):
        span = slice(first, first + steps)
        begin = ends[first - 1] if first else 0
        in_block = tokens[span]
        active = np.zeros((len(in_block), layers, experts), bool)
        step = np.repeat(np.arange(len(in_block)), in_block)
        rows, own = slice(begin, begin + len(step)), slice(None)
        if user is not None:
            own = np.flatnonzero(chunk.array("token.user")[rows] == user)
        active[step[own, None, None], layer, ids[rows][own]] = True
        each = (column[span].tolist() for column in (number, kind, waves[:, 0], tokens))
        yield from map(StepSet, *each, active)


def step_set(step: StepRecord, experts: int) -> tuple[np.ndarray, int]:
    """(the set bool[L, E], waves: 1 where the trace does not know) of one step. Raises TraceError
    as read_step_sets."""
    waves = np.ones(1, np.int16) if step.waves is None else step.waves
    _check(f"step {step.number}", step.ids, waves[None], experts)
    return routed_counts(step.ids, experts) > 0, int(waves[0])


def _check(where: str, ids: np.ndarray, waves: np.ndarray, experts: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < experts):
        raise TraceError(
            f"{where} names experts {ids.min()}…{ids.max()}, the model has {experts}; trace.json "
            "is of another model, or the trace is damaged"
        )
    if (waves != waves[:, :1]).any() or (waves < 1).any():
        raise TraceError(f"{where}: the layers of a step must have the same waves, at least one")


def in_waves(active: np.ndarray, waves: int) -> Iterator[np.ndarray]:
    """The sets bool[M, E] of a step, wave by wave: ranges of ids, as a prefill step makes them."""
    if waves == 1:
        yield active
        return
    experts = active.shape[1]
    wave = np.arange(experts) * waves // experts
    for i in range(waves):
        yield active & (wave == i)
