"""WiSP's right-sizing: experts get the working set of the users that run, KV gets the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, routed_counts
from host_offload.sizing.right_size import EPSILON, right_size_of_use
from host_offload.sizing.split import Division, division_of


class KnownUsers(NamedTuple):
    """State of UserCaps."""

    division: Division
    shape: tuple[int, int]
    """L, E"""
    use: Mapping[int, np.ndarray]
    """User → float64[L, E], decayed counts of what the user's tokens chose; the user whose turn
    ended last comes last."""
    known: frozenset[int] = frozenset()
    """Users with a turn that ended."""
    running: frozenset[int] = frozenset()
    """Users of the last step's rows."""


@dataclasses.dataclass(frozen=True)
class UserCaps:
    """Every layer gets as many cells as the working set of a user needs (WiSP, sections 4 and 5.4).

    A user is a session; requests without one are one user. A user's working set is the experts
    that have all of its use but `epsilon`, in the layer with the most of them (right_size_of_use).
    The paper estimates it by the user's co-activation counts; from these follow exactly the shares
    of use that are counted here. Of several users that run the largest set counts, and a user whose
    first turn runs gets as many cells as KV's floor leaves. The paper serves one user at a time and
    gives no numbers.
    """

    epsilon: float = EPSILON
    decay: float = 0.8
    """Of a user's counts, once a turn."""
    dead: int = 2
    """The least change, in cells of each layer."""
    users: int = 64
    """Most users that are remembered."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    needs: frozenset[str] = frozenset({"ids", "user", "request", "kv_pages"})
    writes: frozenset[str] = frozenset({"cells", "kv_pages"})

    def init(self, spec: Spec) -> KnownUsers:
        """Raises SplitError if KV's floor does not fit."""
        least = min(spec.top_k, division_of(spec).largest_cap)
        return KnownUsers(division_of(spec, least), (spec.layers, spec.experts), {})

    def stats(self, state: KnownUsers) -> dict[str, dict[str, int]]:
        """Statistics: cells of each layer by user."""
        return {"caps": {str(user): self._cap(state, user) for user in state.known}}

    def decide(self, state: KnownUsers, seen: Observation) -> tuple[KnownUsers, Decision]:
        if seen.moment == Moment.STEP_END:
            use, users = dict(state.use), np.unique(seen.user).tolist()
            for user in users:
                counts = routed_counts(seen.ids[seen.user == user], state.shape[1])
                use[user] = use.get(user, 0.0) + counts
            state = state._replace(use=use)
            if state.running == frozenset(users):
                return state, Decision()
            state = state._replace(running=frozenset(users))
        else:
            ended = seen.user[seen.request == seen.turn]
            if not len(ended):  # a failure of others ended it in a step without rows of it
                return state, Decision()
            state = self._end_turn(state, int(ended[0]))
        division = state.division
        cap = max((self._cap(state, user) for user in state.running), default=division.largest_cap)
        units = -(-seen.kv_pages // division.unit_pages)
        now = (division.total_bytes - units * division.unit) // division.cap_bytes
        if abs(cap - now) < self.dead:
            return state, Decision()
        cells = np.full(state.shape[0], cap, np.int32)
        return state, Decision(cells=cells, kv_pages=division.pages_at(cap))

    def _end_turn(self, state: KnownUsers, user: int) -> KnownUsers:
        others = {one: use for one, use in state.use.items() if one != user}
        while len(others) >= self.users and (idle := [u for u in others if u not in state.running]):
            del others[idle[0]]
        known = (state.known | {user}) & {*others, user}
        return state._replace(use={**others, user: state.use[user] * self.decay}, known=known)

    def _cap(self, state: KnownUsers, user: int) -> int:
        division = state.division
        if user not in state.known:
            return division.largest_cap
        use = state.use[user]
        wanted = right_size_of_use(use / use.sum(axis=1, keepdims=True), self.epsilon).max()
        return min(max(int(wanted), division.least_cap), division.largest_cap)
