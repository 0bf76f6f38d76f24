"""First in, first out."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State


@dataclasses.dataclass(frozen=True)
class FIFO:
    """Evicts the expert of the layer that has been in its cell for longest, whatever its use.

    The prior is the rank of insertion within the layer, 0 for the oldest, and the only term of the
    key. Experts that one step inserted rank by id, in the order in which the device fills them.

    The host sees an insertion one step late. Until then a new expert has the prior of absent
    experts, the newest of all, so it never leaves before older ones. The order is unknown only
    among experts of the last two steps, where the least recently used leaves first. An expert that
    was evicted and inserted again within that time keeps its old rank.
    """

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"state"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)

    def init(self, spec: Spec) -> np.ndarray:
        """int32[L, E]: rank of insertion, E: absent."""
        return np.full((spec.layers, spec.experts), spec.experts, np.int32)

    def decide(self, state: np.ndarray, seen: Observation) -> tuple[np.ndarray, Decision]:
        present = ~np.isin(seen.state, (State.ABSENT, State.ARRIVING))
        experts = state.shape[1]
        # Older experts keep their order; new ones still have rank E and follow by id.
        order = np.argsort(np.where(present, state, experts + 1), axis=1, kind="stable")
        rank = np.empty_like(state)
        np.put_along_axis(rank, order, np.arange(experts, dtype=np.int32)[None], axis=1)
        rank = np.where(present, rank, np.int32(experts))
        if np.array_equal(rank, state):
            return state, Decision()
        return rank, Decision(prior=rank)
