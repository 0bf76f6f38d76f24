"""What every queue keeps: order.py says what begins next, and a clock, native threads and jax's
copies begin it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.native import NativeQueue
from host_offload.queue.order import TransferQueue
from host_offload.queue.transfer import Load, QueueError, Source, Transfer
from host_offload.queue.virtual import VirtualQueue
from tests.host_offload.queue.operations import operations, play
from tests.host_offload.queue.test_device_copies import PIECE, RECORDS, Link, queue_on
from tests.pallas_kernels.contract import NATIVE


class Subject:
    """A queue whose chunks begin in steps. begun: (ticket, bytes of the transfer before it)."""

    queue: Any
    chunk_bytes: int
    parts: tuple[int, ...] = ()
    """Those of every transfer; empty: any."""
    pipelined = False
    """A chunk ends with the next step."""

    def __init__(self):
        self.begun: list[tuple[int, int]] = []

    def submit(self, transfer: Transfer, parts: tuple[int, ...]) -> int:
        return self.queue.submit(transfer, parts)

    def step(self) -> None:
        raise NotImplementedError


class Clock(Subject):
    """A step ends the chunk under way, and the next one begins at that time."""

    pipelined = True

    def __init__(self, chunk_bytes: int):
        super().__init__()
        self.chunk_bytes, self._end = chunk_bytes, 0.0
        self.queue = VirtualQueue(1.0, chunk_bytes=chunk_bytes, log=self._note)

    def _note(self, chunk, begin, end):
        self.begun.append((chunk.ticket, chunk.first))
        self._end = end

    def step(self):
        self.queue.advance(max(self._end, self.queue.now))


class Threads(Subject):
    """None but the caller's, which carries out a chunk in each step."""

    def __init__(self, chunk_bytes: int):
        super().__init__()
        self.chunk_bytes = chunk_bytes
        self.queue = NativeQueue(threads=0, chunk_bytes=chunk_bytes)
        self.queue.record()
        self._source, self._cell = np.zeros((2, 256), np.uint8)

    def submit(self, transfer, parts):
        source = Source(address=self._source.ctypes.data)
        return self.queue.submit(transfer, Load(parts, source, self._cell.ctypes.data))

    def step(self):
        self.queue.step()
        self.begun += [(span.ticket, span.first) for span in self.queue.spans()]


class Jax(Subject):
    """With room for one chunk; the others of a demand begin with its first."""

    def __init__(self, chunk_bytes: int):
        super().__init__()
        self.chunk_bytes, self.parts, self._link = PIECE, RECORDS.sizes, Link()
        self.tickets: dict[str, int] = {}
        self.queue = queue_on(self._link, ahead=1)

    def submit(self, transfer, parts):
        ticket = self.queue.submit(transfer)
        self.tickets[f"{transfer.layer}.{transfer.expert}"] = ticket
        return ticket

    def step(self):
        self.queue.begin()
        for name in self._link.begun[len(self.begun) :]:
            place, matrix = name.split()
            self.begun.append((self.tickets[place], PIECE * "gud".index(matrix)))
        while self._link.under_way:  # seen one after the other, as they end on a link
            self._link.arrive()
            self.queue.arrived()


QUEUES = pytest.mark.parametrize("make", [Clock, pytest.param(Threads, marks=NATIVE), Jax])


@QUEUES
@given(asked=operations(), chunk_bytes=st.integers(1, 9))
def test_it_answers_begins_and_shows_what_the_specification_does(make, asked, chunk_bytes):
    """The same tickets and refusals, the same chunks in the same order, the same observations."""
    subject = make(chunk_bytes)
    specified, begun = TransferQueue(subject.chunk_bytes), []
    under_way = None

    def step():
        nonlocal under_way
        if under_way:
            specified.end(under_way)
        under_way = specified.next_chunk()
        if under_way:
            begun.append((under_way.ticket, under_way.first))
            if not subject.pipelined:
                specified.end(under_way)
                under_way = None

    rest = iter(lambda: ("step",) if specified.waiting else None, None)
    for operation in itertools.chain(asked, rest):
        match operation:
            case ("step",):
                subject.step()
                step()
                while len(begun) < len(subject.begun):
                    step()
                assert subject.begun == begun
            case ("submit", transfer, parts):
                parts = subject.parts or parts
                wanted = play(specified, ("submit", transfer, parts))
                try:
                    assert subject.submit(transfer, parts) == wanted
                except QueueError:
                    assert wanted is None
            case _:
                assert play(subject.queue, operation) == play(specified, operation)
        seen, expected = subject.queue.observe(), specified.observe()
        assert (seen.flying, seen.settled) == (expected.flying, expected.settled)
    subject.queue.close()


@QUEUES
def test_close_ends_what_has_begun_cancels_the_rest_and_takes_nothing_more(make):
    subject = make(PIECE)
    for number in range(2):
        subject.submit(Transfer(0, number, 0, number, "prefetch"), RECORDS.sizes)
    subject.step()
    subject.queue.close()
    subject.queue.close()
    assert {ticket for ticket, _ in subject.begun} == {1}
    with pytest.raises(QueueError, match="the queue is closed"):
        subject.submit(Transfer(0, 2, 0, 2), RECORDS.sizes)


@QUEUES
def test_what_it_does_not_have_is_refused(make):
    subject = make(PIECE)
    with pytest.raises(QueueError, match="no ticket 1"):
        subject.queue.wait(1)
    subject.submit(Transfer(0, 0, 0, 7), RECORDS.sizes)
    with pytest.raises(QueueError, match="cell 7 has a transfer under way, ticket 1"):
        subject.submit(Transfer(0, 1, 0, 7), RECORDS.sizes)
    with pytest.raises(QueueError, match="no part 3"):
        subject.queue.wait(1, 3)
    subject.queue.close()
