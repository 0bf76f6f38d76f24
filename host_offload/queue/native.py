"""The queue whose chunks native threads copy and read, beside compute.

It has the methods of `virtual.VirtualQueue`, over pallas_kernels/cpu/transfer_queue.h. The caller
must keep the memory at the addresses of a load until its transfer has settled.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

from host_offload.memory import bounded_reads
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
"""Seconds of a wait between two checks of Python's signals."""


def _fields(**kinds: str) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a structure, given names of fields by kind of number."""
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
    _fields_ = _fields(int64="threads chunk_bytes", double="rate latency patience")


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
        "transfers_hanging": (number, (handle,)),
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
    """Counters of a queue since it was made."""

    demand_bytes: int
    """Bytes that arrived of transfers queued as demands."""
    ahead_bytes: int
    """Bytes that arrived of transfers queued with another cause."""
    demands: int
    """Transfers queued as demands that arrived."""
    ahead: int
    """Transfers queued with another cause that arrived."""
    late: int
    """Transfers ahead that an op had to wait for; the others were in time, or never needed."""
    cancelled: int
    failed: int
    retried: int
    """Failed transfers ahead of need that were queued again, as demands, when needed."""
    waits: int
    """Times that an op waited for bytes."""
    flying: int
    """Transfers that have not settled."""
    bytes_left: int
    """Bytes of those transfers that are not there yet."""
    wait_seconds: float | None
    """Time in which an op waited; None: not known."""
    busy_seconds: float
    """Time with a chunk under way on the link."""
    unpacked: int = 0
    """Records that were decoded from the arena itself, without the link."""
    unpacked_bytes: int = 0
    """Dense bytes of those records."""
    unpack_seconds: float = 0.0
    """Time with a chunk of those records under way."""


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
    """Bytes of the transfer before the chunk."""
    bytes: int
    begin: float
    end: float
    cause: str = ""
    """The transfer's cause when the chunk began; empty: it was queued before `record`."""


class NativeQueue:
    """A queue and its threads, closed by `close` or at the end of a `with`.

    - `threads`: with 0, a thread that waits carries chunks out itself, in the queue's order.
    - `rate`: most bytes per second of the link; 0: no limit.
    - `latency`: seconds from a chunk's end on the link until its bytes count as there.
    - `direct`: whether files are read past the page cache if possible.

    Raises QueueError for numbers out of range, and ValueError, with the command that mends it, if
    the native library is missing.
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
        """Guards `_files` and `_causes`."""
        text = ctypes.create_string_buffer(_TEXT)
        options = _Options(threads, chunk_bytes, rate, latency, bounded_reads.READ_S)
        self.handle = self._calls.moejax_transfers_new(options, text, _TEXT)
        """The number by which ops name the queue."""
        if self.handle < 0:
            raise QueueError(f"{threads} threads cannot be started: {_decode_text(text)}")
        # Also at the end of the process, before the memory that the threads write to is gone.
        self._delete = finalize_here(self, self._calls.moejax_transfers_delete, self.handle)

    def __enter__(self) -> NativeQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- as TransferQueue

    def submit(self, transfer: Transfer, load: Load) -> int:
        """Queues a transfer as TransferQueue.submit does. A file is opened when it is first named,
        and must not change from then on."""
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
        """Waits until a part is there, or all parts (None), or the transfer has settled otherwise.
        Returns how it settled; None if it has not settled yet. Raises QueueError for an unknown
        ticket, or one whose end was observed."""
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
        """Whether the file is read with O_DIRECT. Raises QueueError if it cannot be read."""
        self._require_open()
        return bool(self._calls.moejax_transfers_direct(self.handle, self._file(os.fspath(path))))

    def wait_cell(self, cell: int, part: int | None = None) -> State:
        """Waits, as an op does before it reads a cell, for a part of the transfer that writes the
        cell, which becomes a demand.

        Returns "done" if the part is there or no transfer writes the cell, "failed" if the last
        transfer into the cell failed. Raises QueueError for a part that does not exist.
        """
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
        """Says whether settled transfers are kept for `observe`, which is the default. Switch this
        off for a queue that is never observed, since they would be kept for ever."""
        self._require_open()
        self._calls.moejax_transfers_keep_settled(self.handle, keep)

    def cause_number(self, cause: str) -> int:
        """Returns the native library's number of a cause; 0 is a demand."""
        return self._cause(cause)

    def file_number(self, path: str) -> int:
        """Returns the number by which sources name a file. The file is opened now and must not
        change. Raises QueueError if it cannot be read."""
        self._require_open()
        return self._file(path)

    def require_answers(self) -> None:
        """Raises QueueError if reads that were given up have not returned: they may still write
        into their cells."""
        self._require_open()
        if count := self._calls.moejax_transfers_hanging(self.handle):
            raise QueueError(
                f"reads of {count} experts have had no answer for {bounded_reads.READ_S:g} s; "
                "nothing else can have their memory until the disk answers"
            )

    def step(self) -> bool:
        """Carries out one chunk in this thread. Returns False if none waits."""
        self._require_open()
        return bool(self._calls.moejax_transfers_step(self.handle))

    def record(self) -> None:
        """Begins to record the chunks that `spans` returns."""
        self._require_open()
        self._calls.moejax_transfers_record(self.handle, 1)

    def spans(self) -> list[Span]:
        """Returns the chunks that began and ended since the last call, in the order in which they
        began, out of at most 65536 events of the queue."""
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
                given = self.handle, os.fsencode(path), self._direct, text, _TEXT
                add = functools.partial(self._calls.moejax_transfers_add_file, *given)
                try:
                    number = bounded_reads.read_within(path, add)
                except OSError as error:
                    raise QueueError(f"{path}: {error.strerror}") from None
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
    """Returns the native library's number of a part; -1: all parts. Raises QueueError for a
    negative part."""
    if part is not None and part < 0:
        raise QueueError(f"parts count from 0, there is no part {part}")
    return -1 if part is None else part


def _check(source: Source) -> int:
    """Returns the number of the checksum's kind. Raises QueueError for a malformed checksum."""
    digits = {0: 0, 16: 1, 8: 2}.get(len(source.checksum))
    if digits is None or source.checksum.strip("0123456789abcdef"):
        raise QueueError(f"{source.checksum!r} is not 16 hex digits of SHA-256 or 8 of CRC-32C")
    return digits


def _decode_text(text: Any) -> str:
    return text.value.decode(errors="replace")
