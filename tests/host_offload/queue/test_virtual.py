"""The queue over a clock: what a link of stated rate and latency does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.transfer import DEMAND, Load, QueueError, Transfer
from host_offload.queue.virtual import VirtualQueue


def transfer(cell=0, cause="prefetch", priority=0):
    return Transfer(0, cell, 0, cell, cause, priority)


def test_bytes_take_their_time_and_the_latency_once():
    queue = VirtualQueue(rate=100, latency=0.5, chunk_bytes=50)
    ticket = queue.submit(transfer(), Load((100, 100)))
    queue.wait(ticket, 0)
    assert queue.now == pytest.approx(1.5)
    settled = queue.wait(ticket)
    assert settled and settled.state == "done"
    assert queue.now == pytest.approx(2.5)
    assert queue.observe().busy_seconds == pytest.approx(2.5)


def test_progress_on_the_way():
    queue = VirtualQueue(rate=10, chunk_bytes=10)
    queue.submit(transfer(0), Load((40,)))
    queue.submit(transfer(1), Load((40,)))
    queue.advance(2.5)
    progress = queue.observe()
    assert [f.bytes_left for f in progress.flying] == [20, 40]
    assert [f.begun for f in progress.flying] == [True, False]
    assert progress.busy_seconds == pytest.approx(2.5)
    assert progress.bytes_left == 60


def test_what_comes_at_one_time_is_ordered_before_it_begins():
    queue = VirtualQueue(rate=10)
    queue.submit(transfer(0), Load((10,)))
    queue.submit(transfer(1, DEMAND), Load((10,)))
    queue.submit(transfer(2), Load((10,)))
    assert queue.cancel(1)
    queue.wait(2)
    assert queue.now == pytest.approx(1)
    queue.wait(3)
    assert queue.now == pytest.approx(2)


def test_a_failure_frees_the_cell_and_says_why():
    queue = VirtualQueue(rate=10, chunk_bytes=5, fails=lambda chunk: "gone" if chunk.first else "")
    settled = queue.wait(queue.submit(transfer(), Load((5, 5, 5))))
    assert settled and (settled.state, settled.message) == ("failed", "gone")
    assert queue.now == pytest.approx(1)
    queue.submit(transfer(), Load((1,)))


def test_close_ends_what_has_begun_and_cancels_the_rest():
    queue = VirtualQueue(rate=10, chunk_bytes=5)
    queue.submit(transfer(0), Load((20,)))
    queue.submit(transfer(1), Load((20,)))
    queue.advance(0.1)
    queue.close()
    assert [s.state for s in queue.observe().settled] == ["cancelled", "done"]
    assert queue.now == pytest.approx(2)
    with pytest.raises(QueueError, match="the queue is closed"):
        queue.submit(transfer(2), Load((1,)))


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
        ticket = queue.submit(transfer(cell, cause), Load((size,)))
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
