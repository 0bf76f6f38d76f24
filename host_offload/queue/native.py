"""The queue carried out by native threads: copies and reads that run beside compute.

The same protocol as `virtual.VirtualQueue`, over pallas_kernels/cpu/transfer_queue.h. Addresses are
the caller's to keep: what a load names must stay until its transfer has settled.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

from host_offload.queue.transfer import (
    CHUNK_BYTES,
    DEMAND,
    Flying,
    Load,
    Progress,
    QueueError,
    Settled,
    Source,
    State,
    Transfer,
)
from pallas_kernels.cpu.finalizer import finalize_here
from pallas_kernels.cpu.library import library

_STATES: dict[int, State] = {2: "done", 3: "failed", 4: "cancelled"}
_SUBMIT, _REORDER, _START, _END = 0, 2, 3, 4
"""Kinds of TransferEvent."""

_TEXT = 4096
_WAIT_SECONDS = 0.1
"""Python's signals are looked at so often during a wait."""


def _fields(**kinds: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure: kind of number → their names."""
    numbers = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "uint64": ctypes.c_uint64}
    numbers["double"] = ctypes.c_double
    return tuple((name, numbers[kind]) for kind, names in kinds.items() for name in names.split())


_PLACE = "layer expert version cause priority"


class _Request(ctypes.Structure):
    """TransferRequest."""

    _fields_ = _fields(
        int64="cell destination source entry",
        uint64="checksum",
        int32=f"{_PLACE} value file check parts unused",
    )


class _Record(ctypes.Structure):
    """TransferRecord."""

    _fields_ = _fields(int64="ticket cell bytes bytes_left", int32=f"{_PLACE} state")


class _Options(ctypes.Structure):
    _fields_ = _fields(int64="threads chunk_bytes", double="rate latency")


class _Event(ctypes.Structure):
    _fields_ = _fields(int64="kind ticket a b", double="seconds")


@functools.cache
def _library() -> ctypes.CDLL:
    functions, text = library(), (ctypes.c_char_p, ctypes.c_int64)
    handle, number = ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "transfers_new": (handle, (ctypes.POINTER(_Options), *text)),
        "transfers_delete": (None, (handle,)),
        "transfers_add_file": (ctypes.c_int32, (handle, ctypes.c_char_p, ctypes.c_int32, *text)),
        "transfers_direct": (ctypes.c_int32, (handle, ctypes.c_int32)),
        "transfers_submit": (
            number,
            (handle, ctypes.POINTER(_Request), ctypes.POINTER(number), *text),
        ),
        "transfers_cancel": (ctypes.c_int32, (handle, number)),
        "transfers_reorder": (ctypes.c_int32, (handle, number, ctypes.c_int32, ctypes.c_int32)),
        "transfers_find": (ctypes.c_void_p, (handle, number)),
        "transfers_waited": (None, (ctypes.c_void_p,)),
        "transfers_wait": (
            ctypes.c_int32,
            (
                *(handle, ctypes.c_void_p, number, ctypes.c_double),
                *(ctypes.POINTER(_Record), *text),
            ),
        ),
        "transfers_wait_cell": (ctypes.c_int32, (handle, number, number)),
        "transfers_observe": (
            ctypes.c_double,
            (handle, *(ctypes.POINTER(_Record), ctypes.POINTER(number)) * 2),
        ),
        "transfers_message": (None, (handle, number, *text)),
        "transfers_totals": (None, (handle, ctypes.POINTER(_Totals))),
        "transfers_keep_settled": (None, (handle, ctypes.c_int32)),
        "transfers_step": (ctypes.c_int32, (handle,)),
        "transfers_record": (None, (handle, ctypes.c_int32)),
        "transfers_events": (number, (handle, ctypes.POINTER(_Event), number)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, f"moejax_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a queue did since it was made."""

    demand_bytes: int
    """That arrived, of transfers that were queued as demands."""
    ahead_bytes: int
    """That arrived, of those queued with another cause."""
    demands: int
    """Transfers that arrived, by the same."""
    ahead: int
    late: int
    """Transfers ahead that an op had to wait for; the others were in time, or never needed."""
    cancelled: int
    failed: int
    retried: int
    """Failed ones that were queued ahead of need, and once more, as demands, when needed."""
    waits: int
    """Times that an op waited for bytes."""
    flying: int
    """Transfers that have not settled."""
    bytes_left: int
    """Bytes of those that are not there."""
    wait_seconds: float | None
    """With an op waiting; None: not known."""
    busy_seconds: float
    """With a chunk under way on the link."""
    unpacked: int = 0
    """Transfers that were decoded from the arena itself, without the link."""
    unpacked_bytes: int = 0
    """Dense bytes of those."""
    unpack_seconds: float = 0.0
    """With a chunk of those under way."""


class _Totals(ctypes.Structure):
    """TransferTotals, whose fields are those of Totals."""

    _fields_ = tuple(
        (field.name, ctypes.c_double if field.name.endswith("seconds") else ctypes.c_int64)
        for field in dataclasses.fields(Totals)
    )


@dataclasses.dataclass(frozen=True)
class Span:
    """A chunk that was carried out. Times are those of time.monotonic."""

    ticket: int
    first: int
    """Bytes of its transfer before it."""
    bytes: int
    begin: float
    end: float
    cause: str = ""
    """Its transfer's when it began; empty: that was queued before anything was recorded."""


class NativeQueue:
    """A queue and its threads, closed by `close` or at the end of a `with`.

    threads: 0 means that who waits carries chunks out, in the queue's order. rate: bytes per second
    of the link, at most; 0: as fast as it goes. latency: seconds from a chunk's end on the link
    until its bytes count as there. direct: files are read past the page cache where that can be.

    Raises QueueError for numbers that make no sense, ValueError with the command that mends it
    where the native library is missing.
    """

    def __init__(
        self,
        *,
        threads: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        rate: float = 0.0,
        latency: float = 0.0,
        direct: bool = True,
    ):
        if threads < 0 or chunk_bytes < 1 or not rate >= 0 or not latency >= 0:
            raise QueueError(
                f"{threads} threads, chunks of {chunk_bytes} bytes, {rate} bytes/s, {latency} s"
            )
        self._calls, self._direct = _library(), direct
        self._files: dict[str, int] = {}
        self._causes = [DEMAND]
        self._lock = threading.Lock()
        """Held while files or causes are looked up."""
        text = ctypes.create_string_buffer(_TEXT)
        options = _Options(threads, chunk_bytes, rate, latency)
        self.handle = self._calls.moejax_transfers_new(options, text, _TEXT)
        """What ops name the queue by."""
        if self.handle < 0:
            raise QueueError(f"{threads} threads cannot be started: {_decode_text(text)}")
        # At the end of the process too, before what the threads write into is gone.
        self._delete = finalize_here(self, self._calls.moejax_transfers_delete, self.handle)

    def __enter__(self) -> NativeQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- as TransferQueue

    def submit(self, transfer: Transfer, load: Load) -> int:
        """As TransferQueue; a file is looked at when first named, and must stay as it is then."""
        self._require_open()
        source, parts, check = load.source, load.parts, _check(load.source)
        request = _Request(
            *(transfer.cell, load.destination, source.offset if source.path else source.address),
            *(load.entry, int(source.checksum or "0", 16)),
            *(transfer.layer, transfer.expert, transfer.version),
            *(self._cause(transfer.cause), transfer.priority, load.value),
            *(self._file(source.path), check, len(parts), 0),
        )
        text = ctypes.create_string_buffer(_TEXT)
        sizes = (ctypes.c_int64 * max(len(parts), 1))(*parts)
        ticket = self._calls.moejax_transfers_submit(self.handle, request, sizes, text, _TEXT)
        if not ticket:
            raise QueueError(_decode_text(text))
        return ticket

    def cancel(self, ticket: int) -> bool:
        self._require_open()
        return bool(self._calls.moejax_transfers_cancel(self.handle, ticket))

    def reorder(self, ticket: int, cause: str, priority: int) -> bool:
        self._require_open()
        number = self._cause(cause)
        return bool(self._calls.moejax_transfers_reorder(self.handle, ticket, number, priority))

    def wait(self, ticket: int, part: int | None = None) -> Settled | None:
        """Returns when a part is there, or the whole (None), or the transfer has settled in another
        way; None where it has not settled yet. Raises QueueError for a ticket that never was or
        whose end was observed."""
        self._require_open()
        record, number, text = _Record(), _part(part), ctypes.create_string_buffer(_TEXT)
        transfer = self._calls.moejax_transfers_find(self.handle, ticket)
        if transfer is None:
            raise QueueError(f"there is no ticket {ticket}, or its end was observed")
        there = 0
        try:
            while not there:
                there = self._calls.moejax_transfers_wait(
                    self.handle, transfer, number, _WAIT_SECONDS, record, text, _TEXT
                )
        finally:
            self._calls.moejax_transfers_waited(transfer)
        if there == -1:
            raise QueueError("the queue is closed")
        if there < 0:
            raise QueueError(f"ticket {ticket} has no part {part}")
        if record.state not in _STATES:
            return None
        return Settled(ticket, self._transfer(record), _STATES[record.state], _decode_text(text))

    def observe(self) -> Progress:
        self._require_open()
        flying, settled, busy = self._records()
        return Progress(
            busy,
            tuple(
                Flying(r.ticket, self._transfer(r), r.bytes, r.bytes_left, r.state == 1)
                for r in flying
            ),
            tuple(self._settled(r) for r in settled),
        )

    def close(self) -> None:
        self._delete()

    # ---- what only this backend has

    def reads_past_the_cache(self, path: str | os.PathLike[str]) -> bool:
        """Whether the file is read with O_DIRECT. Raises QueueError where it cannot be read."""
        self._require_open()
        return bool(self._calls.moejax_transfers_direct(self.handle, self._file(os.fspath(path))))

    def wait_cell(self, cell: int, part: int | None = None) -> State:
        """What an op does before it reads a cell: waits for a part of the transfer that writes it,
        which is a demand from now on. "done" where the part is there or nobody writes, "failed"
        until another transfer into the cell. Raises QueueError for a part that there is not."""
        self._require_open()
        number = _part(part)
        state = self._calls.moejax_transfers_wait_cell(self.handle, cell, number)
        if state < 0:
            raise QueueError(f"what is written into cell {cell} has no part {part}")
        return _STATES[state]

    def totals(self) -> Totals:
        self._require_open()
        totals = _Totals()
        self._calls.moejax_transfers_totals(self.handle, totals)
        return Totals(**{f.name: getattr(totals, f.name) for f in dataclasses.fields(Totals)})

    def keep_settled(self, keep: bool) -> None:
        """Whether what settles from now on is kept for the next observation, as it is at first.
        Not for queues that only ops and `totals` ask: it would be kept for ever."""
        self._require_open()
        self._calls.moejax_transfers_keep_settled(self.handle, keep)

    def cause_number(self, cause: str) -> int:
        """The number that the library knows a cause by; 0: a demand."""
        return self._cause(cause)

    def file_number(self, path: str) -> int:
        """The number that sources name a file by, which is looked at now and must stay as it is.
        Raises QueueError where it cannot be read."""
        self._require_open()
        return self._file(path)

    def step(self) -> bool:
        """Carries out one chunk in this thread; False where none waits."""
        self._require_open()
        return bool(self._calls.moejax_transfers_step(self.handle))

    def record(self) -> None:
        """From now on `spans` has something to say."""
        self._require_open()
        self._calls.moejax_transfers_record(self.handle, 1)

    def spans(self) -> list[Span]:
        """The chunks that began and ended since the last call, in the order in which they began,
        65536 events of the queue at most."""
        self._require_open()
        events = (_Event * (1 << 16))()
        count = self._calls.moejax_transfers_events(self.handle, events, len(events))
        ends = {(e.ticket, e.a): e.seconds for e in events[:count] if e.kind == _END}
        causes: dict[int, str] = {}
        found = []
        for e in events[:count]:
            if e.kind in (_SUBMIT, _REORDER):
                causes[e.ticket] = self._causes[e.a]
            elif e.kind == _START and (e.ticket, e.a) in ends:
                end, cause = ends[e.ticket, e.a], causes.get(e.ticket, "")
                found.append(Span(e.ticket, e.a, e.b, e.seconds, end, cause))
        return found

    # ---- parts

    def _require_open(self) -> None:
        if not self._delete.alive:
            raise QueueError("the queue is closed")

    def _cause(self, cause: str) -> int:
        with self._lock:
            if cause not in self._causes:
                self._causes.append(cause)
            return self._causes.index(cause)

    def _file(self, path: str) -> int:
        if not path:
            return -1
        with self._lock:
            if path not in self._files:
                text = ctypes.create_string_buffer(_TEXT)
                number = self._calls.moejax_transfers_add_file(
                    self.handle, os.fsencode(path), self._direct, text, _TEXT
                )
                if number < 0:
                    raise QueueError(_decode_text(text))
                self._files[path] = number
            return self._files[path]

    def _records(self) -> tuple[Sequence[_Record], Sequence[_Record], float]:
        room = 64
        while True:
            flying, settled = (_Record * room)(), (_Record * room)()
            counts = ctypes.c_int64(room), ctypes.c_int64(room)
            busy = self._calls.moejax_transfers_observe(
                self.handle, flying, counts[0], settled, counts[1]
            )
            most = max(count.value for count in counts)
            if most <= room:
                return flying[: counts[0].value], settled[: counts[1].value], busy
            room = 2 * most

    def _transfer(self, r: _Record) -> Transfer:
        cause = self._causes[r.cause]
        return Transfer(r.layer, r.expert, r.version, r.cell, cause, r.priority)

    def _settled(self, r: _Record) -> Settled:
        message = self._message(r.ticket) if r.state == 3 else ""
        return Settled(r.ticket, self._transfer(r), _STATES[r.state], message)

    def _message(self, ticket: int) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._calls.moejax_transfers_message(self.handle, ticket, text, _TEXT)
        return _decode_text(text)


def _part(part: int | None) -> int:
    """How the library is told it; -1: all. Raises QueueError for a negative one."""
    if part is not None and part < 0:
        raise QueueError(f"parts count from 0, there is no part {part}")
    return -1 if part is None else part


def _check(source: Source) -> int:
    """The number of the checksum's kind. Raises QueueError where it is none."""
    digits = {0: 0, 16: 1, 8: 2}.get(len(source.checksum))
    if digits is None or source.checksum.strip("0123456789abcdef"):
        raise QueueError(f"{source.checksum!r} is not 16 hex digits of SHA-256 or 8 of CRC-32C")
    return digits


def _decode_text(text: Any) -> str:
    return text.value.decode(errors="replace")
