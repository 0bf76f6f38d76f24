"""Fate: the gate of the next layer on this layer's gate input, and a cache of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.memory.budget import cells_per_layer
from host_offload.policies.eviction.arc import Directory
from host_offload.policies.prefetch.next_layers import chosen_by_rows, gate_scores, stages_of

CACHES = ("arc", "none")


class Cached(NamedTuple):
    """State of Fate."""

    router: np.ndarray
    """float32[L, D, E]"""
    top_k: int
    layers: tuple[Directory, ...]
    """What ARC knows of each layer."""
    prior: np.ndarray
    """int32[L, E]: 0: ARC does not know of it; then from who goes first on."""
    granted: int = -1
    """The sum of the cells that `shallow` was last carried out for; −1: not yet."""


@dataclasses.dataclass(frozen=True)
class Fate:
    """Cross-layer gate (Fang et al. 2025, arXiv:2502.12224; as a baseline in PreScope,
    section 6.1): gate inputs of adjacent layers are alike, so the next layer's gate on the present
    input says whom each token will choose. Everybody whom some row chooses is wanted, those of most
    rows first. The first layer has no prediction.

    Its cache, as its abstract describes it (no code was found): ARC evicts within a layer, and
    shallow layers, whose predictions are worst, are favoured with cells. An expert that was brought
    ahead and not used yet goes before those that were. Needs driver="host". What is left out of the
    paper: docs/policies.md.
    """

    cache: str = "arc"
    """"none": whoever else decides about eviction does."""
    shallow: int = 0
    """So many first layers get cells for all of their experts, as far as the others keep top-k
    each; it then writes `cells`, which grids of equal cells refuse."""

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset({Moment.ROUTED, *([Moment.STEP_BEGIN] if self.shallow else [])})

    @property
    def needs(self) -> frozenset[str]:
        cache = {"ids", "cells"} if self.cache == "arc" or self.shallow else set()
        return frozenset({"gate_input", "router", *cache})

    @property
    def writes(self) -> frozenset[str]:
        cache = {"victim_weights", "prior"} if self.cache == "arc" else set()
        return frozenset({"stages", *cache, *(["cells"] if self.shallow else [])})

    @property
    def victim_weights(self) -> tuple[int, int, int] | None:
        """The prior alone, which is ARC's order."""
        return (0, 0, 1) if self.cache == "arc" else None

    def init(self, spec: Spec) -> Cached:
        """Nobody was seen. Raises ValueError for settings that mean nothing."""
        if self.cache not in CACHES or not 0 <= self.shallow < spec.layers:
            raise ValueError(
                f"cache is one of {', '.join(CACHES)} and shallow lies in 0…{spec.layers - 1}, not "
                f"{self.cache!r} and {self.shallow}"
            )
        if self.shallow and spec.cell_bound < spec.experts:
            raise ValueError(
                f"a layer can have {spec.cell_bound} cells and has {spec.experts} experts, so no "
                "layer can have cells for all; leave out shallow"
            )
        assert spec.router is not None
        prior = np.zeros((spec.layers, spec.experts), np.int32)
        return Cached(spec.router, spec.top_k, (Directory(),) * spec.layers, prior)

    def decide(self, state: Cached, observation: Observation) -> tuple[Cached, Decision]:
        seen: Any = observation
        if observation.moment == Moment.STEP_BEGIN:
            return self._granted(state, seen.cells)
        prior = None
        if self.cache == "arc":
            state = _referenced(state, seen.layer, np.unique(seen.ids), seen.cells)
            prior = state.prior
        layer = seen.layer + 1
        if layer == len(state.router):
            return state, Decision(prior=prior, stages=())
        scores = gate_scores(seen.gate_input[:, 0], state.router[layer])
        stages = stages_of(layer, chosen_by_rows(scores, state.top_k), "fate")
        return state, Decision(prior=prior, stages=stages)

    def _granted(self, state: Cached, cells: np.ndarray) -> tuple[Cached, Decision]:
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


def _referenced(state: Cached, layer: int, experts: np.ndarray, cells: np.ndarray) -> Cached:
    """After a layer's references, those of lower ids first."""
    if not cells[layer]:
        return state
    directory = state.layers[layer]
    for expert in experts.tolist():
        directory = directory.referenced(expert, int(cells[layer]))
    prior = state.prior.copy()
    prior[layer] = 0
    prior[layer, list(directory.order())] = 1 + np.arange(len(directory.order()))
    layers = (*state.layers[:layer], directory, *state.layers[layer + 1 :])
    return state._replace(layers=layers, prior=prior)
