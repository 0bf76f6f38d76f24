"""Times of native ops, one by one: the library keeps a log while a recording runs."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from pallas_kernels.cpu.library import library

_ROOM = 4096


@dataclasses.dataclass(frozen=True)
class OpSpan:
    """An op that ran. Times are those of time.monotonic."""

    op: str
    """The target's name, as in library.TARGETS."""
    layer: int | None
    """The model's layer, counted over all layers; None: the op does not know it."""
    begin: float
    end: float


class _Record(ctypes.Structure):
    """OpRecord."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("begin", "end")),
        ("layer", ctypes.c_int32),
        ("op", ctypes.c_char * 28),
    )


@contextmanager
def recorded() -> Iterator[list[OpSpan]]:
    """Records all native ops of this process inside the `with`. The list is filled at its end,
    sorted by begin. Only one recording may run at a time.

    Raises ValueError if the library cannot run here, RuntimeError if more ops ran than the log
    holds (a million).
    """
    calls, spans = library(), []
    calls.moejax_cpu_spans_take.restype = ctypes.c_int64
    _take(calls)
    calls.moejax_cpu_spans_record(1)
    try:
        yield spans
    finally:
        calls.moejax_cpu_spans_record(0)
        found, dropped = _take(calls)
    if dropped:
        raise RuntimeError(f"{dropped} ops were not recorded: the log was full; record less")
    spans += sorted(found, key=lambda span: span.begin)


def _take(calls: ctypes.CDLL) -> tuple[list[OpSpan], int]:
    """(spans in the log, number of spans that did not fit)."""
    found: list[OpSpan] = []
    records, dropped, total = (_Record * _ROOM)(), ctypes.c_int64(), 0
    while True:
        count = calls.moejax_cpu_spans_take(records, ctypes.c_int64(_ROOM), ctypes.byref(dropped))
        total += dropped.value
        found += [
            OpSpan(r.op.decode(), None if r.layer < 0 else r.layer, r.begin, r.end)
            for r in records[:count]
        ]
        if count < _ROOM:
            return found, total
