"""Prefetch by the tokens of a step, which are known before it: the sampled ones and the drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, stages_at

NAME = "tokens"


class Remembered(NamedTuple):
    """State of TokenPrefetch."""

    experts: int
    known: Mapping[int, np.ndarray]
    """Token → int16[L, k], the experts it chose when it was last seen; the longest unseen first."""
    wanted: np.ndarray
    """int64[n, 2]: (layer, expert) of the running step, the most urgent first."""


@dataclasses.dataclass(frozen=True)
class TokenPrefetch:
    """Prefetches, before a decode step, the experts that its tokens chose when they were last seen.

    Routing depends mostly on the token. That of n-gram drafts is known, since they occurred before,
    so drafts tell ahead which experts several tokens need, as the draft models of MoE-SpeQ (Wang et
    al. 2025, arXiv:2511.14102) and SP-MoE (Chen et al. 2025, arXiv:2510.10302) do. Experts of the
    nearest layer come first, then those of most rows. Rejected drafts teach routing too. Needs
    driver="host".
    """

    capacity: int = 4096
    """Tokens that are remembered, at most."""
    begun: Remembered | None = dataclasses.field(default=None, repr=False, compare=False)
    """The state to begin with."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED, Moment.STEP_END})
    needs: frozenset[str] = frozenset(
        {"token", "draft_token", "draft_ids", "ids", "request", "position", "phase"}
    )
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Remembered:
        """Nothing was seen yet. Raises ValueError for a capacity below 1."""
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {self.capacity}")
        return self.begun or Remembered(spec.experts, {}, np.zeros((0, 2), np.int64))

    def memory(self, spec: Spec) -> int:
        """Bytes of what it remembers."""
        return self.capacity * spec.layers * spec.top_k * 2

    def decide(self, state: Remembered, seen: Observation) -> tuple[Remembered, Decision]:
        if seen.moment == Moment.STEP_END:
            return self.learn(state, seen), Decision()
        if seen.moment == Moment.EMBEDDED:
            wanted = _predict(state, seen)
        else:
            wanted = state.wanted[state.wanted[:, 0] > seen.layer]
        state = state._replace(wanted=wanted)
        return state, Decision(stages=stages_at(wanted[:, 0], wanted[:, 1], NAME))

    def learn(self, state: Remembered, seen: Observation) -> Remembered:
        """The state after a step. Of a token's rows the last one counts, rejected drafts first."""
        known = dict(state.known)
        # A replay has the rows in another order than the engine.
        order = np.lexsort((seen.request, seen.position))
        for tokens, ids, rows in (
            (seen.draft_token, seen.draft_ids, np.arange(len(seen.draft_token))),
            (seen.token, seen.ids, order),
        ):
            last = dict(zip(tokens[rows].tolist(), rows.tolist(), strict=True))
            last.pop(-1, None)
            for token, row in last.items():
                known.pop(token, None)
                known[token] = ids[row].copy()  # a view would keep the whole step
        for token in [*known][: max(len(known) - self.capacity, 0)]:
            del known[token]
        return state._replace(known=known)


def _predict(state: Remembered, seen: Observation) -> np.ndarray:
    """Remembered.wanted of the step that begins. Prompts, which need nearly all experts, have
    none."""
    tokens = np.concatenate([seen.token, seen.draft_token]).tolist() if seen.phase.all() else []
    found = [state.known[token] for token in tokens if token in state.known]
    if not found:
        return np.zeros((0, 2), np.int64)
    ids = np.stack(found).astype(np.int64)
    places, rows = np.unique(
        ids + state.experts * np.arange(ids.shape[1])[:, None], return_counts=True
    )
    layer, expert = np.divmod(places, state.experts)
    order = np.lexsort((expert, -rows, layer))
    return np.stack([layer[order], expert[order]], axis=1)
