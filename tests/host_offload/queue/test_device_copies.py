"""The queue that jax's own copies carry out: its order, what it stages, how it fails."""

import threading
import time

import jax
import numpy as np
import pytest

from host_offload.queue.device import DeviceQueue, TransferLost
from host_offload.queue.pinned import PinnedBuilder, PinnedRecords
from host_offload.queue.transfer import DEMAND, QueueError, Transfer
from pallas_kernels.records.format import RecordFormat

LAYERS, EXPERTS = 2, 4
FORMAT = RecordFormat("dense", 8, 4, "bfloat16")
PIECE = 4 * 8 * 2
"""Bytes of a matrix."""
VALUES = np.arange(LAYERS * EXPERTS * FORMAT.rows * 8, dtype=np.uint16)
VALUES = VALUES.reshape(LAYERS, EXPERTS, FORMAT.rows, 8)


def pinned(chunk_bytes=None) -> PinnedRecords:
    builder = PinnedBuilder(FORMAT, LAYERS, EXPERTS, jax.devices()[0], chunk_bytes=chunk_bytes)
    for layer, records in enumerate(VALUES):
        builder.put(layer, 0, records)
    return builder.finish().arrays["dense"]


RECORDS = pinned()


class Link:
    """A link on which nothing arrives by itself: it has to be waited for, or told to."""

    def __init__(self):
        self.begun: list[str] = []
        """Layer, expert and matrix of what began, in order."""
        self.fails: dict[str, Exception] = {}
        """What goes wrong with a piece when its copy begins."""
        self.under_way: list[Copy] = []

    def __call__(self, pieces):
        copies = [Copy(self, piece) for piece in pieces]
        for copy in copies:
            if error := self.fails.get(copy.name):
                raise error
        self.begun += [copy.name for copy in copies]
        self.under_way += copies
        return copies

    def arrive(self, count: int = 1) -> None:
        for copy in self.under_way[:count]:
            copy.there = True
        del self.under_way[:count]


class Copy:
    """What a copy is to the queue: a jax array's methods."""

    def __init__(self, link: Link, piece: jax.Array):
        self.values = np.asarray(piece)
        layer, expert, matrix, _ = np.unravel_index(
            int(self.values[0, 0]) // 8, (LAYERS, EXPERTS, 3, 4)
        )
        self.name, self._link, self.there = f"{layer}.{expert} {'gud'[matrix]}", link, False
        self.error: Exception | None = None

    def is_ready(self) -> bool:
        return self.there

    def block_until_ready(self):
        while not self.there:
            self._link.arrive()
        if self.error is not None:
            raise self.error
        return self


class Mark:
    """What a program that reads a record gives back: ready when somebody waits for it."""

    there = False

    def is_ready(self) -> bool:
        return self.there

    def block_until_ready(self):
        self.there = True
        return self


def queue_on(link: Link, ahead: int = 2, records: PinnedRecords = RECORDS) -> DeviceQueue:
    return DeviceQueue([records], jax.devices()[0], ahead=ahead, put=link)


def transfer(layer, expert, cause="prefetch", priority=0, cell=None) -> Transfer:
    return Transfer(
        layer, expert, 0, layer * EXPERTS + expert if cell is None else cell, cause, priority
    )


def test_demands_begin_at_once_and_others_as_far_as_there_is_room():
    queue = queue_on(link := Link())
    queue.submit(transfer(0, 0))
    queue.submit(transfer(0, 1))
    queue.submit(transfer(0, 2, DEMAND))
    assert link.begun == []
    queue.begin(others=False)
    assert link.begun == ["0.2 g", "0.2 u", "0.2 d"]
    queue.begin()
    assert link.begun[3:] == ["0.0 g", "0.0 u"]
    queue.submit(transfer(1, 3, DEMAND))
    link.arrive(3)
    queue.begin()  # the demand's copies are there, the window is still full
    assert link.begun[5:] == ["1.3 g", "1.3 u", "1.3 d"]
    link.arrive(1)
    queue.begin()
    assert link.begun[8:] == ["0.0 d"]
    link.arrive(10)
    queue.begin()
    assert link.begun[9:] == ["0.1 g", "0.1 u"]


def test_a_record_is_handed_over_when_it_is_there():
    queue = queue_on(link := Link())
    ticket = queue.submit(transfer(1, 2))
    queue.begin()
    assert queue.arrived() == []
    link.arrive(2)
    queue.begin()
    link.arrive(1)
    assert queue.arrived() == [ticket]
    taken = []

    def move(pieces):
        taken.extend(pieces)
        return pieces[-1]

    queue.take(ticket, move)
    assert np.array_equal(np.concatenate([piece.values for piece in taken]), VALUES[1, 2])
    assert queue.arrived() == []
    totals = queue.totals()
    assert (totals.ahead, totals.ahead_bytes, totals.late, totals.waits) == (1, 3 * PIECE, 0, 0)


def test_a_record_that_is_taken_before_it_is_there_ends_when_it_was_read():
    """What had not begun begins as a demand; who wants the cell next waits for the mark."""
    queue = queue_on(link := Link(), ahead=1)
    queue.submit(transfer(0, 0))
    late = queue.submit(transfer(0, 1))
    mark = Mark()
    queue.begin()
    assert link.begun == ["0.0 g"]
    given = []
    queue.take(late, lambda pieces: given.append(len(pieces)) or mark)
    assert given == [3] and link.begun[1:] == ["0.1 g", "0.1 u", "0.1 d"]
    link.arrive(4)
    assert [f.bytes_left for f in queue.observe().flying] == [2 * PIECE, 3 * PIECE]
    with pytest.raises(QueueError, match="has a transfer under way, ticket 1"):
        queue.submit(transfer(0, 0))
    assert not mark.there
    assert queue.submit(transfer(0, 1)) == 3
    assert mark.there
    assert [s.ticket for s in queue.observe().settled] == [late]
    totals = queue.totals()
    assert (totals.ahead, totals.late, totals.waits) == (1, 1, 1)
    assert totals.busy_seconds > 0 and totals.wait_seconds is None


def test_waits_are_counted_from_when_records_were_needed():
    """Beside the caller: neither is ready when it says what to look at."""
    queue = queue_on(Link())
    needed, read = threading.Event(), threading.Event()

    class Pending:
        def __init__(self, event):
            self.event = event

        def block_until_ready(self):
            assert self.event.wait(60)

    queue.watch(Pending(needed), Pending(read))
    time.sleep(0.05)
    needed.set()
    time.sleep(0.1)
    read.set()
    queue.close()
    assert 0.05 < queue.totals().wait_seconds < 60


@pytest.mark.parametrize("error", [OSError("no"), MemoryError("no")], ids=str)
def test_a_copy_that_does_not_begin_fails_its_transfer_alone(error):
    queue = queue_on(link := Link())
    link.fails["0.1 u"] = error
    bad, good = queue.submit(transfer(0, 1, DEMAND)), queue.submit(transfer(0, 2, DEMAND))
    queue.begin()
    assert link.begun == ["0.2 g", "0.2 u", "0.2 d"]
    assert queue.failed(bad) and not queue.failed(good)
    with pytest.raises(TransferLost, match="Error: no"):
        queue.take(bad, lambda pieces: pieces[0])
    assert queue.wait(good) and queue.totals().failed == 1
    again = queue.submit(transfer(0, 1, DEMAND))
    link.fails.clear()
    queue.begin()
    assert queue.wait(again) and not queue.failed(again)


def test_a_copy_that_fails_on_its_way_is_found_when_it_ends():
    queue = queue_on(link := Link(), ahead=3)
    ticket = queue.submit(transfer(0, 1))
    queue.begin()
    link.under_way[1].error = jax.errors.JaxRuntimeError("the link broke")
    link.arrive(3)
    assert queue.arrived() == [] and queue.failed(ticket)
    assert "the link broke" in queue.observe().settled[0].message


def test_what_nobody_wants_is_cancelled_or_ends_without_being_handed_over():
    queue = queue_on(link := Link(), ahead=1)
    begun, waiting = queue.submit(transfer(0, 0)), queue.submit(transfer(0, 1))
    queue.begin()
    queue.drop(waiting)
    assert queue.totals().cancelled == 1
    queue.drop(begun)
    assert link.begun == ["0.0 g", "0.0 u", "0.0 d"]
    assert queue.arrived() == [] and queue.totals().flying == 0
    assert [s.state for s in queue.observe().settled] == ["cancelled", "done"]


def test_several_records_are_handed_over_to_one_program_or_none_is():
    queue = queue_on(link := Link(), ahead=6)
    first, second = queue.submit_all([transfer(0, 0), transfer(0, 1)])
    queue.begin()
    link.arrive(3)
    assert queue.arrived() == [first]
    taken, mark = [], Mark()

    def move(records):
        taken.extend(records)
        return mark

    queue.take_all([first, second], move)  # one is there, the other still comes
    assert [[piece.name for piece in pieces] for pieces in taken] == [
        ["0.0 g", "0.0 u", "0.0 d"],
        ["0.1 g", "0.1 u", "0.1 d"],
    ]
    assert (queue.totals().waits, queue.totals().late, queue.totals().ahead) == (1, 1, 1)
    mark.there = True
    assert (queue.totals().ahead, queue.totals().flying) == (2, 0)

    link.fails["1.1 u"] = OSError("gone")
    third, fourth = queue.submit_all([transfer(1, 0), transfer(1, 1)])
    queue.begin()
    with pytest.raises(TransferLost, match="OSError: gone"):
        queue.take_all([third, fourth], move)
    assert len(taken) == 2 and queue.failed(fourth) and not queue.failed(third)
    queue.take(third, lambda pieces: mark)
    queue.drop(fourth)
    link.fails.clear()
    again = queue.submit_again(transfer(1, 1, DEMAND))
    queue.take(again, lambda pieces: mark)
    assert (queue.totals().retried, queue.totals().failed) == (1, 1)
    queue.close()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(QueueError, match="0 chunks ahead"):
        queue_on(Link(), ahead=0)
    queue = queue_on(Link())
    with pytest.raises(QueueError, match="there is no expert 4 of layer 0"):
        queue.submit(transfer(0, 4))
    queue.close()
    queue.close()
    with pytest.raises(QueueError, match="the queue is closed"):
        queue.submit(transfer(0, 0))


def test_jax_carries_it_out():
    device = jax.devices()[0]
    queue = DeviceQueue([RECORDS], device)
    ticket, found = queue.submit(transfer(1, 1, DEMAND)), []

    def move(pieces):
        found.append(jax.numpy.concatenate(pieces))
        return found[0]

    queue.take(ticket, move)
    assert np.array_equal(found[0], VALUES[1, 1])
    assert found[0].devices() == {device}
    queue.close()
