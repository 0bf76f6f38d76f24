"""Streams layers beside residents that are used most, in cells that all layers share: FluxMoE's
window in an engine that pages."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State, stages_at

NAME = "fluxmoe"
ABSENT = int(State.ABSENT)


@dataclasses.dataclass(frozen=True)
class FluxMoE:
    """Brings the experts of the next layer while a layer computes, as many as transfers between
    layers allow, whatever routers will choose (FluxMoE, arXiv:2604.02715, sections 3.1 and 4.1).

    Two layers have room for all their experts. The other cells hold experts of each layer that were
    used most, the same number in each. Of the others the least recently used leave first. If cells
    do not suffice for two layers, the next one gets what one leaves. Needs driver="host". What
    differs from the paper: docs/explanation/policies.md.
    """

    pool: bool = True
    victim_weights: tuple[int, int, int] = (0, 0, 1)
    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN, Moment.LAYER_BEGIN, Moment.ROUTED})
    needs: frozenset[str] = frozenset({"state", "cells", "frequency"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})

    def init(self, spec: Spec) -> np.ndarray:
        """The prior int32[L, E]: 1 for residents and the coming layer."""
        return np.zeros((spec.layers, spec.experts), np.int32)

    def decide(self, prior: np.ndarray, seen: Observation) -> tuple[np.ndarray, Decision]:
        if seen.moment == Moment.STEP_BEGIN:
            # A step carries out its own list behind its layers, too late for the first one.
            return prior, Decision(stages=())
        layers, experts = seen.state.shape
        spare, coming = int(seen.cells.sum()) - 2 * experts, seen.layer
        if routed := seen.moment == Moment.ROUTED:
            # The pool keeps what the layer needs until it was computed.
            residents = max(spare, 0) // max(layers - 2, 1)
            coming, prior = (seen.layer + 1) % layers, prior.copy()
            prior[seen.layer] = 0
            prior[seen.layer, _by_use(seen.frequency[seen.layer])[:residents]] = 1
            prior[coming] = 1
        wanted = _by_use(seen.frequency[coming])
        absent = wanted[seen.state[coming, wanted] == ABSENT]
        stages = stages_at(coming, absent[: max(len(absent) + min(spare, 0), 0)], NAME)
        return prior, Decision(prior=prior if routed else None, stages=stages)


def _by_use(frequency: np.ndarray) -> np.ndarray:
    """Returns the experts of a layer, the most often used first."""
    return np.argsort(-frequency, kind="stable")
