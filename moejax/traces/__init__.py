"""Reads traces, under the name that users know: docs/reference/trace_format.md."""

from host_offload.control.step_record import StepRecord as StepTrace
from host_offload.traces.reader import Chunk, Trace, read_trace
from host_offload.traces.schema import Mark, TraceError, TraceHeader, TransferTrace

__all__ = ["Chunk", "Mark", "StepTrace", "Trace", "TraceError", "TraceHeader", "TransferTrace"]
__all__ += ["read_trace"]
