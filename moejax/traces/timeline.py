"""Writes timelines as files for Perfetto: of a run that native ops recorded, or predicted.

docs/explanation/transfers.md says how to read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from host_offload.queue.native import Span
from host_offload.simulate.timeline import DEVICE, TimelineEvent, write_trace
from moejax.errors import UserError
from pallas_kernels.cpu.spans import OpSpan

WRITERS = ("kv_write", "latent_write")
"""The ops that know which layer they belong to."""


def check_timeline(path: str | os.PathLike[str]) -> None:
    """Raises UserError for a file that write_timeline cannot write."""
    if Path(path).suffix != ".json":
        raise UserError(f"{path}: a timeline is FILE.json, for https://ui.perfetto.dev")
    if not Path(path).absolute().parent.is_dir():  # before all that would be drawn
        raise UserError(f"{path} cannot be written: its folder does not exist")


def write_timeline(path: str | os.PathLike[str], events: Sequence[TimelineEvent]) -> None:
    """Writes all events for Perfetto and chrome://tracing. Raises UserError for a suffix other than
    .json or a file that cannot be written."""
    check_timeline(path)
    try:
        write_trace(Path(path), events)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def measured_events(ops: Sequence[OpSpan], chunks: Iterable[Span] = ()) -> list[TimelineEvent]:
    """Returns events of what native ops recorded (in order of their beginning), beside the chunks
    that a queue moved. Times count from the first op, and chunks before it are left out."""
    if not ops:
        return []
    first = ops[0].begin
    layers = _layers(ops)
    found = [
        TimelineEvent(DEVICE, op.op, op.begin - first, op.end - first, layer)
        for op, layer in zip(ops, layers, strict=True)
    ]
    for span in chunks:
        if span.begin >= first:
            said = f"{span.cause or 'chunk'} {span.ticket} from byte {span.first}"
            found.append(TimelineEvent("link", said, span.begin - first, span.end - first))
    return found


def _layers(ops: Sequence[OpSpan]) -> list[int | None]:
    """Returns the layer of each op: the layer whose KV was written last, or the next layer once its
    norm has begun. Ops after the last layer of a step belong to no layer."""
    found: list[int | None] = [op.layer for op in ops]
    current: int | None = None
    last = max((op.layer for op in ops if op.layer is not None), default=0)
    since = 0  # the first op that may belong to the layer to come
    for i, op in enumerate(ops):
        if op.op in WRITERS and op.layer is not None:
            norms = [j for j in range(since, i) if ops[j].op == "rms_norm"]
            # After the experts every op is the next layer's; elsewhere from its last norm on.
            follows = op.layer > 0 and since and ops[since - 1].op == "combine"
            begin = since if follows else (norms[-1] if norms else i)
            for j in range(begin, i):
                found[j] = op.layer
            current, since = op.layer, i + 1
        elif current is not None:
            found[i] = current
            if op.op == "combine":
                since = i + 1
                current = None if current == last else current
    return found
