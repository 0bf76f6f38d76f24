"""The pages of turns, from the rows of steps alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.kv_references import MOST_TURNS, KVReferences


def see(references: KVReferences, *rows: tuple[int, int, int]) -> None:
    request, user, position = np.array(rows, np.int32).T
    references.see(request, user, position)


def test_the_next_turn_of_a_session_has_its_pages_again():
    references = KVReferences(page_tokens=16)
    see(references, (0, 3, 15))
    first = references.end(0)
    # What it goes on from is not computed again: its rows begin at 16.
    see(references, (1, 3, 16), (1, 3, 40))
    assert references.end(1).tolist() == [*first.tolist(), [3, 1], [3, 2]]


def test_requests_that_never_end_are_forgotten():
    references, many = KVReferences(page_tokens=16), np.arange(MOST_TURNS + 7, dtype=np.int32)
    references.see(many, np.full_like(many, -1), np.zeros_like(many))
    assert [len(references.end(request)) for request in (0, 6, 7, MOST_TURNS + 6)] == [0, 0, 1, 1]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=6),
        max_size=8,
    ),
    st.integers(1, 20),
)
def test_equals_the_definition(steps, page_tokens):
    references, longest = KVReferences(page_tokens), dict.fromkeys(range(4), 0)
    for step in steps:
        see(references, *((request, request - 2, position) for request, position in step))
        for request, position in step:
            longest[request] = max(longest[request], position + 1)
    for request, tokens in longest.items():
        pages = {position // page_tokens for position in range(tokens)}
        owner = request - 2 if request >= 2 else -1 - request
        assert references.end(request).tolist() == [[owner, page] for page in sorted(pages)]
