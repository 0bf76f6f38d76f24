"""Mixtral-Offloading: the next layer's router on this layer's input, beside an LRU cache."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State
from host_offload.policies.prefetch.next_layers import gate_scores, softmax, stages_of, sum_rows
from pallas_kernels.plan.victim import MAX_PRIOR

NAME = "mixtral-offloading"

ABSENT = int(State.ABSENT)
"""A plain number: numpy takes its time to see that an enumeration's is one."""


class Buffered(NamedTuple):
    """State of MixtralOffloading."""

    router: np.ndarray
    """float32[L, D, E]"""
    speculated: np.ndarray
    """bool[L, E]: experts in buffers: loaded speculatively and not used since."""


@dataclasses.dataclass(frozen=True)
class MixtralOffloading:
    """Speculative expert loading beside an LRU cache (Eliseev and Mazur 2023, arXiv:2312.17238,
    "LRU caching" and "Speculative Expert Loading"; a baseline in fMoE, section 6.1). Its public
    code, src/expert_cache.py of dvmazur/mixtral-offloading, commit ce545188, has only the cache.

    When a layer was routed, the next layer's router is applied to the same normalised input, and
    the `count` likeliest experts are loaded, by probabilities summed over rows. They are in
    buffers: an expert enters the cache only when it is used, in place of the least recently used
    one. Here a layer's buffers are `count` of its cells: unused speculated experts are evicted
    first, and a layer with C cells keeps the C − count experts that it used last. The first layer
    has no prediction. Needs driver="host". What is left out of the paper:
    docs/explanation/policies.md.
    """

    count: int = 2
    """Experts a layer; the paper loads one or two."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router", "ids", "state"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})
    victim_weights: tuple[int, int, int] = (1, 0, 1)
    """LRU; the prior of experts in buffers is below any age."""

    def init(self, spec: Spec) -> Buffered:
        """Empty buffers."""
        if not 1 <= self.count <= spec.experts:
            raise ValueError(f"count must lie in 1…{spec.experts}, not {self.count}")
        assert spec.router is not None
        return Buffered(spec.router, np.zeros((spec.layers, spec.experts), bool))

    def decide(self, state: Buffered, seen: Observation) -> tuple[Buffered, Decision]:
        absent = seen.state == ABSENT
        speculated = state.speculated & ~absent
        speculated[seen.layer, seen.ids] = False
        chosen: list[int] = []
        layer = seen.layer + 1
        if layer < len(state.router) and len(seen.gate_input):
            likely = sum_rows(softmax(gate_scores(seen.gate_input[:, 0], state.router[layer])))
            chosen = np.argsort(-likely, kind="stable")[: self.count].tolist()
            speculated[layer, chosen] |= absent[layer, chosen]
        prior = None
        if (speculated != state.speculated).any():
            prior = np.where(speculated, -MAX_PRIOR, 0).astype(np.int32)
        decision = Decision(prior=prior, stages=stages_of(layer, chosen, NAME))
        return state._replace(speculated=speculated), decision
