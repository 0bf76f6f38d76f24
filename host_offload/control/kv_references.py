"""Records which KV pages each turn used: the reference stream of KV's miss curve (WiSP, Eq 4).

A live decode step touches every page of its own sequences, so a page counts once per turn, and a
turn is what the paper calls a burst: a request from its prompt to its last token.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

MOST_TURNS = 100_000
"""Most turns that are followed at once, so that aborted requests are forgotten in the end."""


class KVReferences:
    """Follows the token rows of steps. It needs only what a trace has, so engine and simulator get
    the same references.

    - `page_tokens`: tokens of a page.
    """

    def __init__(self, page_tokens: int):
        self.page_tokens = page_tokens
        self._turns: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """(session, or −1 − request; tokens with KV) of each request."""

    def see(self, request: np.ndarray, user: np.ndarray, position: np.ndarray) -> None:
        """Takes the rows of a step, int32[N] each, as in an Observation."""
        numbers, first, place = np.unique(request, return_index=True, return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, place, position + 1)
        rows = zip(numbers.tolist(), user[first].tolist(), ends.tolist(), strict=True)
        for number, session, end in rows:
            owner = session if session >= 0 else -1 - number
            self._turns[number] = owner, max(end, self._turns.get(number, (owner, 0))[1])
        while len(self._turns) > MOST_TURNS:
            self._turns.popitem(last=False)

    def end(self, request: int) -> np.ndarray:
        """Ends a turn. Returns int64[R, 2], its pages: (session, or −1 − request without one; place
        in the sequence). Pages shared with other requests count as its own."""
        owner, tokens = self._turns.pop(request, (-1 - request, 0))
        pages = np.arange(-(-tokens // self.page_tokens), dtype=np.int64)
        return np.stack([np.full_like(pages, owner), pages], axis=1)
