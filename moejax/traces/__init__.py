"""Reading traces, under the name users know: see host_offload.traces.reader and
docs/trace_format.md."""

from __future__ import annotations

from host_offload.control.step_record import StepRecord as StepTrace
from host_offload.traces.reader import (
    Chunk,
    Mark,
    Trace,
    TraceError,
    TraceHeader,
    TransferTrace,
    read_trace,
)

__all__ = [
    "Chunk",
    "Mark",
    "StepTrace",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TransferTrace",
    "read_trace",
]
