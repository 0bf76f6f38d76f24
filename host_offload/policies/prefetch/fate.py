"""Fate: the gate of the next layer on this layer's gate input."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.next_layers import chosen_by_rows, gate_scores, stages_of


@dataclasses.dataclass(frozen=True)
class Fate:
    """Cross-layer gate (Fang et al. 2025, arXiv:2502.12224; as a baseline in PreScope,
    section 6.1): gate inputs of adjacent layers are alike, so the next layer's gate on the present
    input says whom each token will choose. Everybody whom some row chooses is wanted, those of most
    rows first. The first layer has no prediction. Needs driver="host". What is left out of the
    paper: docs/policies.md.
    """

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> tuple[np.ndarray, int]:
        """(the routers float32[L, D, E], top-k)."""
        assert spec.router is not None
        return spec.router, spec.top_k

    def decide(
        self, state: tuple[np.ndarray, int], observation: Observation
    ) -> tuple[tuple[np.ndarray, int], Decision]:
        seen: Any = observation
        router, top_k = state
        layer = seen.layer + 1
        if layer == len(router):
            return state, Decision(stages=())
        experts = chosen_by_rows(gate_scores(seen.gate_input[:, 0], router[layer]), top_k)
        return state, Decision(stages=stages_of(layer, experts, "fate"))
