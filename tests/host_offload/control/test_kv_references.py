"""The pages of turns, from the rows of steps alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import host_offload.control.kv_references
from host_offload.control.kv_references import KVReferences


def see(references: KVReferences, *rows: tuple[int, int, int]) -> None:
    request, user, position = np.array(rows, np.int32).T
    references.see(request, user, position)


def test_a_turn_has_each_page_once():
    references = KVReferences(page_tokens=16)
    see(references, *((4, 7, position) for position in range(17)), (5, -1, 0))
    see(references, (5, -1, 1), (4, 7, 17))
    assert references.end(4).tolist() == [[7, 0], [7, 1]]
    assert references.end(5).tolist() == [[-6, 0]]
    # It has ended, and the step that was already dispatched for it begins nothing that counts.
    assert references.end(4).shape == (0, 2)


def test_the_next_turn_of_a_session_has_its_pages_again():
    references = KVReferences(page_tokens=16)
    see(references, (0, 3, 15))
    first = references.end(0)
    # What it goes on from is not computed again: its rows begin at 16.
    see(references, (1, 3, 16), (1, 3, 40))
    assert references.end(1).tolist() == [*first.tolist(), [3, 1], [3, 2]]


def test_requests_that_never_end_are_forgotten(monkeypatch):
    monkeypatch.setattr(host_offload.control.kv_references, "MOST_TURNS", 3)
    references = KVReferences(page_tokens=16)
    for request in range(10):
        see(references, (request, -1, 0))
    assert len(references._turns) == 3 and len(references.end(9)) == 1


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
