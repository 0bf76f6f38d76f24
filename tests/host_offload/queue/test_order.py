"""The queue without threads or clock."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.order import TransferQueue
from host_offload.queue.transfer import DEMAND, QueueError, Transfer
from host_offload.queue.virtual import VirtualQueue
from tests.host_offload.queue.operations import operations, play


def transfer(cell=0, cause="prefetch", priority=0):
    return Transfer(0, cell, 0, cell, cause, priority)


def begun(queue):
    """Tickets of all chunks that wait, in the order in which they begin; none of them ends."""
    return [chunk.ticket for chunk in iter(queue.next_chunk, None)]


def test_demands_go_first_then_priority_then_who_came_first():
    queue = TransferQueue(10)
    asked = [("prefetch", 1), ("prefetch", 0), (DEMAND, 5), ("prefetch", 0), (DEMAND, 2)]
    for cell, (cause, priority) in enumerate(asked):
        queue.submit(transfer(cell, cause, priority), (10,))
    assert begun(queue) == [5, 3, 2, 4, 1]


def test_a_failed_chunk_is_the_last_to_begin():
    queue = TransferQueue(1)
    queue.submit(transfer(), (5,))
    first, second = queue.next_chunk(), queue.next_chunk()
    assert queue.end(first, "a.bin: a short read") is None
    assert queue.next_chunk() is None
    settled = queue.end(second)
    assert settled and (settled.state, settled.message) == ("failed", "a.bin: a short read")
    assert queue.submit(transfer(), (1,)) == 2


def test_an_expert_comes_in_parts():
    """Gate, up and down (PreScope's AsyncIO): no chunk has bytes of two, and a part is there before
    the others are."""
    queue = TransferQueue(4)
    ticket = queue.submit(transfer(), (6, 3, 2))
    chunks = [*iter(queue.next_chunk, None)]
    expected = [(0, 0, 4), (0, 4, 2), (1, 6, 3), (2, 9, 2)]
    assert [(each.part, each.first, each.bytes) for each in chunks] == expected
    for chunk in chunks[:2]:
        queue.end(chunk)
    assert [queue.there(ticket, part) for part in range(3)] == [True, False, False]


def test_what_has_no_bytes_is_refused():
    for parts in ((), (3, 0), (-1,)):
        with pytest.raises(QueueError, match="needs bytes in each part"):
            TransferQueue().submit(transfer(), parts)
    with pytest.raises(QueueError, match="chunks of 0 bytes"):
        TransferQueue(0)


@given(st.data())
def test_every_transfer_settles_once_and_all_its_bytes_move(data):
    queue = TransferQueue(data.draw(st.integers(1, 9)))
    bytes_of, moved, ends = {}, {}, []
    for operation in data.draw(operations()):
        answer = play(queue, operation)
        if operation[0] == "submit" and answer:
            bytes_of[answer] = sum(operation[2])
        if operation[0] == "step" and answer:
            moved[answer.ticket] = moved.get(answer.ticket, 0) + answer.bytes
        ends += queue.observe().settled
    while chunk := play(queue, ("step",)):
        moved[chunk.ticket] = moved.get(chunk.ticket, 0) + chunk.bytes
    ends += queue.observe().settled
    assert sorted(end.ticket for end in ends) == sorted(bytes_of)
    for end in ends:
        assert moved.get(end.ticket, 0) == (bytes_of[end.ticket] if end.state == "done" else 0)


# ---- over a clock


def test_bytes_take_their_time_and_the_latency_once():
    queue = VirtualQueue(rate=100, latency=0.5, chunk_bytes=50)
    ticket = queue.submit(transfer(), (100, 100))
    queue.advance(1.0)
    (flying,) = queue.observe().flying
    assert (flying.bytes_left, flying.begun, queue.observe().bytes_left) == (150, True, 150)
    queue.wait(ticket, 0)
    assert queue.now == pytest.approx(1.5)
    settled = queue.wait(ticket)
    assert settled and settled.state == "done"
    assert queue.now == pytest.approx(2.5)
    assert queue.observe().busy_seconds == pytest.approx(2.5)


def test_a_failure_frees_the_cell_and_says_why():
    queue = VirtualQueue(rate=10, chunk_bytes=5, fails=lambda chunk: "gone" if chunk.first else "")
    settled = queue.wait(queue.submit(transfer(), (5, 5, 5)))
    assert settled and (settled.state, settled.message) == ("failed", "gone")
    assert queue.now == pytest.approx(1)
    queue.submit(transfer(), (1,))


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (1, -1), (float("nan"), 0)])
def test_refuses_a_link_that_cannot_be(rate, latency):
    with pytest.raises(QueueError, match="a link of"):
        VirtualQueue(rate, latency)


def test_the_clock_does_not_go_back():
    queue = VirtualQueue(1)
    queue.advance(2)
    with pytest.raises(QueueError, match=r"the clock is at 2 s, after 1"):
        queue.advance(1)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 3), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 20),
    st.floats(0, 1),
)
def test_the_clock_keeps_its_bounds(asked, chunk_bytes, latency):
    """The link is never faster than its rate, loses no time while something waits, and a demand's
    first chunk waits for one chunk and for demands before it."""
    spans = []
    queue = VirtualQueue(10, latency, chunk_bytes=chunk_bytes, log=lambda *span: spans.append(span))
    came, demands = {}, {}
    for cell, (size, pause, demand) in enumerate(asked):
        cause = DEMAND if demand else "prefetch"
        ticket = queue.submit(transfer(cell, cause), (size,))
        came[ticket], demands[ticket] = queue.now, size if demand else 0
        queue.advance(queue.now + pause)
    for ticket in came:
        queue.wait(ticket)
    assert sum(chunk.bytes for chunk, _, _ in spans) == sum(size for size, _, _ in asked)
    for (chunk, begin, end), (later, next_begin, _) in itertools.pairwise(spans):
        assert end - begin == pytest.approx(chunk.bytes / 10)
        assert next_begin == pytest.approx(max(end, came[later.ticket])) or next_begin == end
    first = {chunk.ticket: begin for chunk, begin, _ in reversed(spans)}
    for ticket, size in demands.items():
        before = sum(demands[other] for other in demands if other < ticket)
        if size:
            assert first[ticket] <= came[ticket] + (chunk_bytes + before) / 10 + 1e-9
    assert queue.now >= spans[-1][2] + latency - 1e-9
