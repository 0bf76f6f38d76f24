"""Fate: the next layer's router on this layer's input, with ARC eviction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.memory.budget import cells_per_layer
from host_offload.policies.eviction.arc import Directory
from host_offload.policies.prefetch.next_layers import (
    distinct,
    gate_scores,
    rank_chosen,
    stages_of,
)


class Cached(NamedTuple):
    """State of Fate."""

    router: np.ndarray
    """float32[L, D, E]"""
    top_k: int
    layers: tuple[Directory, ...]
    """ARC's lists of each layer."""
    prior: np.ndarray
    """int32[L, E]: 0: unknown to ARC; otherwise the rank, the next victim first."""
    granted: int = -1
    """The sum of cells for which `shallow` was last applied; −1: not yet."""


@dataclasses.dataclass(frozen=True)
class Fate:
    """Cross-layer gate (Fang et al. 2025, arXiv:2502.12224; a baseline in PreScope, section 6.1).

    Router inputs of adjacent layers are similar, so the next layer's router on the present input
    predicts the choice of each token. All experts that some row chooses are wanted, those of most
    rows first. The first layer has no prediction.

    The cache follows the abstract (no code was found): ARC evicts within a layer, and shallow
    layers, whose predictions are worst, get more cells. A prefetched expert that was not used yet
    is evicted before used ones. Needs driver="host". What is left out of the paper:
    docs/explanation/policies.md.
    """

    shallow: int = 0
    """This many first layers get cells for all their experts, as far as each other layer keeps
    top-k. The policy then writes `cells`, which grids of equal cells refuse."""

    needs: frozenset[str] = frozenset({"gate_input", "router", "ids", "cells"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)
    """Only the prior, which is ARC's order."""

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset({Moment.ROUTED, *([Moment.STEP_BEGIN] if self.shallow else [])})

    @property
    def writes(self) -> frozenset[str]:
        written = frozenset({"stages", "victim_weights", "prior"})
        return written | {"cells"} if self.shallow else written

    def init(self, spec: Spec) -> Cached:
        """The state before the first step. Raises ValueError for settings out of range."""
        if not 0 <= self.shallow < spec.layers:
            raise ValueError(f"shallow lies in 0…{spec.layers - 1}, not {self.shallow}")
        if self.shallow and spec.cell_bound < spec.experts:
            raise ValueError(
                f"a layer can have {spec.cell_bound} cells and has {spec.experts} experts, so no "
                "layer can have cells for all; leave out shallow"
            )
        assert spec.router is not None
        prior = np.zeros((spec.layers, spec.experts), np.int32)
        return Cached(spec.router, spec.top_k, (Directory(),) * spec.layers, prior)

    def decide(self, state: Cached, seen: Observation) -> tuple[Cached, Decision]:
        if seen.moment == Moment.STEP_BEGIN:
            return self._grant(state, seen.cells)
        state = _reference(state, seen.layer, distinct(seen.ids), seen.cells)
        prior, layer = state.prior, seen.layer + 1
        if layer == len(state.router):
            return state, Decision(prior=prior, stages=())
        scores = gate_scores(seen.gate_input[:, 0], state.router[layer])
        stages = stages_of(layer, rank_chosen(scores, state.top_k), "fate")
        return state, Decision(prior=prior, stages=stages)

    def _grant(self, state: Cached, cells: np.ndarray) -> tuple[Cached, Decision]:
        """Moves cells to the first layers, once for each budget."""
        total, (layers, experts) = int(cells.sum()), state.prior.shape
        if total == state.granted:
            return state, Decision()
        state = state._replace(granted=total)
        for whole in range(self.shallow, 0, -1):
            rest = total - whole * experts
            if rest >= (layers - whole) * state.top_k:
                deep = cells_per_layer(
                    min(rest, (layers - whole) * experts), layers - whole, experts
                )
                return state, Decision(cells=np.array([experts] * whole + [*deep], np.int32))
        return state, Decision()


def _reference(state: Cached, layer: int, experts: Sequence[int], cells: np.ndarray) -> Cached:
    """The state after a layer's references, lower ids first."""
    if not cells[layer]:
        return state
    directory = state.layers[layer].reference(experts, int(cells[layer]))
    prior, order = state.prior.copy(), directory.order()
    prior[layer] = 0
    prior[layer, list(order)] = range(1, len(order) + 1)
    layers = (*state.layers[:layer], directory, *state.layers[layer + 1 :])
    return state._replace(layers=layers, prior=prior)
