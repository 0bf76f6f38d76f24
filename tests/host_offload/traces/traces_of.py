"""Traces written from routing, for tests of what reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import USES, StepRecord
from host_offload.simulate.bounds import References
from host_offload.traces.reader import Trace, TraceHeader, read_trace
from host_offload.traces.writer import TraceWriter

SPEC = {
    "hidden": 4,
    "page_bytes": 10,
    "page_tokens": 16,
    "slots": 10,
    "slot_bytes": 100,
    "kv_floor_bytes": 50,
    "seed": 0,
    "driver": "device",
    "eviction": "lru",
    "version_bytes": {"dense": 100},
}


def write_trace(
    directory: Path,
    routed: Sequence[np.ndarray],
    experts: int,
    *,
    waves: Sequence[int] | None = None,
    spec: dict[str, Any] | None = None,
    chunk_bytes: int = 1 << 20,
    **header: Any,
) -> Trace:
    """A trace of steps with ids int[N, L, k] each. Step n was dispatched at n seconds and read at
    n + 1.5, after the next one was dispatched; those with several waves are prefill steps. What the
    steps hit and moved is left at zero."""
    _, layers, k = routed[0].shape
    facts = TraceHeader(
        layers,
        experts,
        k,
        **{
            **dict(config_digest="0f" * 32, machine={}, command=["run"], created="now"),
            **dict(spec=SPEC | {"cells": [experts // 2] * layers} | (spec or {})),
            **header,
        },
    )
    with TraceWriter(directory, facts, chunk_bytes=chunk_bytes) as writer:
        for number, ids in enumerate(routed):
            step = _step(number, ids.astype(np.int16), experts, waves[number] if waves else 1)
            absent = {c.split(".")[1]: None for c in facts.absent}
            writer.append(step._replace(**absent))
    return read_trace(directory)


def rewritten(directory: Path, trace: Trace, steps: Iterable[StepRecord], **header: Any) -> Trace:
    """A trace of other steps."""
    with TraceWriter(directory, dataclasses.replace(trace.header, **header)) as writer:
        for step in steps:
            writer.append(step)
    return read_trace(directory)


def _step(number: int, ids: np.ndarray, experts: int, waves: int) -> StepRecord:
    rows, layers, _ = ids.shape
    none = np.zeros(layers, np.int32)
    return StepRecord(
        request=np.full(rows, 5, np.int32),
        user=np.full(rows, -1, np.int32),
        position=np.arange(rows, dtype=np.int32) + number,
        phase=np.ones(rows, np.uint8),
        ids=ids,
        weights=np.ones(ids.shape, np.float32),
        number=number,
        kind="prefill" if waves > 1 else "decode",
        start_s=float(number),
        read_s=number + 1.5,
        seconds=1.0,
        rows=rows,
        compiled=False,
        hits=none,
        fills=none,
        read_through=none,
        waves=np.full(layers, waves, np.int16),
        missed=np.zeros((layers, experts), bool),
        bytes=np.zeros(3, np.int64),
        use=np.where(np.array(USES) == "running", 1, -1),
        finished=(),
    )


def random_routing(
    rng: np.random.Generator, steps: int, layers: int, experts: int, k: int, rows: int = 1
) -> list[np.ndarray]:
    """Ids int[rows, layers, k] of each step, some experts more popular."""
    share = rng.random((layers, experts)) ** 3
    score = np.log(share) + rng.gumbel(size=(steps, rows, layers, experts))
    return [*np.sort(np.argsort(-score, axis=3)[..., :k], axis=3)]


def references_of(active: np.ndarray, unknown: tuple[int, ...] = ()) -> References:
    """The references of step sets bool[T, L, E]."""
    return References(*active.shape, *np.nonzero(active), unknown=unknown)
