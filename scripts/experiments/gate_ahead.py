"""The simplest predictor that sees the router: what fMoE's maps have to beat (issue 24)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.next_layers import gate_scores, rank_chosen, stages_of


class _Gates(NamedTuple):
    router: np.ndarray
    """float32[L, D, E]"""
    top_k: int


@dataclasses.dataclass(frozen=True)
class GateAhead:
    """The next layer's gate on what this layer's router saw: each row's top-k are brought. It
    learns nothing, and leaves eviction to whatever runs beside it, `lfu + …` or `global-lfu + …`.
    """

    ahead: int = 1
    """Layers."""
    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> _Gates:
        assert spec.router is not None
        return _Gates(spec.router, spec.top_k)

    def decide(self, state: _Gates, seen: Observation) -> tuple[_Gates, Decision]:
        target = seen.layer + self.ahead
        if target >= len(state.router):
            return state, Decision(stages=())
        scores = gate_scores(seen.gate_input[:, 0], state.router[target])
        wanted = rank_chosen(scores, state.top_k)
        return state, Decision(stages=stages_of(target, wanted, "gate_ahead"))
