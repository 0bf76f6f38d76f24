"""Mixtral-Offloading: the next layer's gate on this layer's hidden state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.next_layers import gate_scores, softmax, stages_of, summed


@dataclasses.dataclass(frozen=True)
class MixtralOffloading:
    """Speculative expert loading (Eliseev and Mazur 2023, arXiv:2312.17238, "Speculative Expert
    Loading"; as a baseline in fMoE, section 6.1): when a layer was routed, the gate of the next one
    is applied to the hidden state that is there, the normalised one that the present gate saw, and
    the likeliest experts are loaded, by probabilities summed over rows. The first layer has no
    prediction. Needs driver="host". What is left out of the paper: docs/policies.md.
    """

    count: int = 2
    """Experts a layer; the paper loads one or two."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> np.ndarray:
        """float32[L, D, E]: the routers."""
        if not 1 <= self.count <= spec.experts:
            raise ValueError(f"count must lie in 1…{spec.experts}, not {self.count}")
        assert spec.router is not None
        return spec.router

    def decide(self, state: np.ndarray, observation: Observation) -> tuple[np.ndarray, Decision]:
        seen: Any = observation
        layer = seen.layer + 1
        if layer == len(state) or not len(seen.gate_input):
            return state, Decision(stages=())
        likely = summed(softmax(gate_scores(seen.gate_input[:, 0], state[layer])))
        experts = np.argsort(-likely, kind="stable")[: self.count].tolist()
        return state, Decision(stages=stages_of(layer, experts, "mixtral-offloading"))
