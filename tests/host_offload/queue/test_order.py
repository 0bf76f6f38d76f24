"""The queue without threads or clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.queue.order import TransferQueue
from host_offload.queue.transfer import DEMAND, Chunk, QueueError, Transfer, chunks_of
from tests.host_offload.queue.operations import operations, play


def transfer(cell=0, cause="prefetch", priority=0):
    return Transfer(0, cell, 0, cell, cause, priority)


def begun(queue):
    """Tickets of all chunks that wait, in the order in which they begin; none of them ends."""
    return [chunk.ticket for chunk in iter(queue.next_chunk, None)]


def test_chunks_have_bytes_of_one_part_in_order():
    assert list(chunks_of(3, (5, 2), 4)) == [
        Chunk(3, 0, 0, 4),
        Chunk(3, 0, 4, 1),
        Chunk(3, 1, 5, 2),
    ]


def test_demands_go_first_then_priority_then_who_came_first():
    queue = TransferQueue(10)
    asked = [("prefetch", 1), ("prefetch", 0), (DEMAND, 5), ("prefetch", 0), (DEMAND, 2)]
    for cell, (cause, priority) in enumerate(asked):
        queue.submit(transfer(cell, cause, priority), (10,))
    assert begun(queue) == [5, 3, 2, 4, 1]


def test_a_demand_pauses_the_others_at_the_next_chunk():
    queue = TransferQueue(1)
    queue.submit(transfer(0), (3,))
    assert queue.next_chunk() == Chunk(1, 0, 0, 1)
    queue.submit(transfer(1, DEMAND), (2,))
    assert begun(queue) == [2, 2, 1, 1]


def test_what_has_begun_ends_and_what_has_not_can_be_cancelled():
    queue = TransferQueue(1)
    queue.submit(transfer(0), (2,))
    queue.submit(transfer(1), (2,))
    queue.next_chunk()
    assert not queue.cancel(1)
    assert queue.cancel(2)
    assert not queue.cancel(2)
    assert begun(queue) == [1]
    assert [s.state for s in queue.observe(0).settled] == ["cancelled"]


def test_a_prefetch_that_is_needed_now_becomes_a_demand():
    queue = TransferQueue(1)
    queue.submit(transfer(0, priority=-9), (2,))
    queue.submit(transfer(1), (3,))
    queue.reorder(2, DEMAND, 0)
    assert begun(queue) == [2, 2, 2, 1, 1]
    assert not queue.reorder(1, DEMAND, 0) or queue.there(1, 0) is False


def test_a_cell_has_one_writer():
    queue = TransferQueue(4)
    queue.submit(transfer(7), (4,))
    with pytest.raises(QueueError, match="cell 7 has a transfer under way, ticket 1; wait for it"):
        queue.submit(transfer(7, DEMAND), (4,))
    queue.end(queue.next_chunk())
    assert queue.submit(transfer(7), (4,)) == 2


def test_parts_are_there_one_by_one():
    queue = TransferQueue(4)
    queue.submit(transfer(), (4, 6))
    chunks = [queue.next_chunk() for _ in range(3)]
    assert queue.end(chunks[0]) is None
    assert (queue.there(1, 0), queue.there(1, 1), queue.there(1)) == (True, False, False)
    queue.end(chunks[2])
    assert not queue.there(1, 1)
    assert queue.observe(2.5).flying[0].bytes_left == 4
    settled = queue.end(chunks[1])
    assert settled and settled.state == "done" and queue.there(1, 1)


def test_a_failed_chunk_is_the_last_to_begin():
    queue = TransferQueue(1)
    queue.submit(transfer(), (5,))
    first, second = queue.next_chunk(), queue.next_chunk()
    assert queue.end(first, "a.bin: a short read") is None
    assert queue.next_chunk() is None
    settled = queue.end(second)
    assert settled and (settled.state, settled.message) == ("failed", "a.bin: a short read")
    assert queue.submit(transfer(), (1,)) == 2


def test_an_end_is_observed_once():
    queue = TransferQueue(1)
    queue.submit(transfer(), (1,))
    queue.end(queue.next_chunk())
    assert [s.ticket for s in queue.observe(0).settled] == [1]
    assert queue.observe(0).settled == ()
    with pytest.raises(QueueError, match="no ticket 1, or its end was observed"):
        queue.there(1)


@pytest.mark.parametrize("parts", [(), (3, 0), (-1,)])
def test_a_transfer_has_bytes(parts):
    with pytest.raises(QueueError, match="needs bytes in each part"):
        TransferQueue().submit(transfer(), parts)


def test_refuses_what_is_not_there():
    with pytest.raises(QueueError, match="chunks of 0 bytes"):
        TransferQueue(0)
    queue = TransferQueue()
    with pytest.raises(QueueError, match="no ticket 1"):
        queue.there(1)
    queue.submit(transfer(), (1,))
    with pytest.raises(QueueError, match="ticket 1 has 1 parts, no part 1"):
        queue.there(1, 1)


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
        ends += queue.observe(0).settled
    while chunk := play(queue, ("step",)):
        moved[chunk.ticket] = moved.get(chunk.ticket, 0) + chunk.bytes
    ends += queue.observe(0).settled
    assert sorted(end.ticket for end in ends) == sorted(bytes_of)
    for end in ends:
        assert moved.get(end.ticket, 0) == (bytes_of[end.ticket] if end.state == "done" else 0)
