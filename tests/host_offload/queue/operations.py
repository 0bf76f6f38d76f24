"""Random use of a queue, the same for those that are compared."""

from hypothesis import strategies as st

from host_offload.queue.transfer import DEMAND, QueueError, Transfer


def operations():
    """A list of what `play` plays, over four cells."""
    cause = st.sampled_from([DEMAND, "prefetch", "transition"])
    priority, ticket = st.integers(-1, 1), st.integers(1, 12)
    parts = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
    submit = st.builds(
        lambda cell, cause, priority, parts: (
            "submit",
            Transfer(cell % 2, cell, 0, cell, cause, priority),
            parts,
        ),
        *(st.integers(0, 3), cause, priority, parts),
    )
    return st.lists(
        st.one_of(
            submit,
            submit,
            st.just(("step",)),
            st.tuples(st.just("cancel"), ticket),
            st.tuples(st.just("reorder"), ticket, cause, priority),
        ),
        max_size=40,
    )


def play(queue, operation):
    """Carries out one operation on a TransferQueue; what it answered. A step is the chunk, which
    has ended; None: none waited."""
    match operation:
        case ("submit", transfer, parts):
            try:
                return queue.submit(transfer, parts)
            except QueueError:
                return None
        case ("step",):
            if chunk := queue.next_chunk():
                queue.end(chunk)
            return chunk
        case ("cancel", ticket):
            return queue.cancel(ticket)
        case ("reorder", ticket, cause, priority):
            return queue.reorder(ticket, cause, priority)
