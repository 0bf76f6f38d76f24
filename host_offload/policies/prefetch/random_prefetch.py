"""Random prefetch, a control."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage, State


@dataclasses.dataclass(frozen=True)
class RandomPrefetch:
    """Wants `count` absent experts, drawn at random after each step: the value of a prefetch of
    that many transfers without knowledge. Draws follow from the spec's seed and the step."""

    count: int = 8

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"state"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> int:
        """The seed."""
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        return spec.seed

    def decide(self, state: int, seen: Observation) -> tuple[int, Decision]:
        absent = np.argwhere(seen.state == State.ABSENT)
        rng = np.random.default_rng((state, seen.step))
        drawn = absent[rng.permutation(len(absent))[: self.count]].tolist()
        return state, Decision(stages=tuple(Stage(*place, cause="random") for place in drawn))
