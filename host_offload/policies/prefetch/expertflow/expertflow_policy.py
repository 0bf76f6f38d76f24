"""ExpertFlow as a prefetch: forests that set the gates' guesses right, a step size that follows
what came of it, and two levels of residents."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.expertflow.forest import HISTORY, Seen, scores
from host_offload.policies.prefetch.fitted import Fitted, read_fitted
from host_offload.policies.prefetch.next_layers import (
    chosen_by_rows,
    finite,
    gate_scores,
    stages_of,
)
from pallas_kernels.plan.victim import MAX_PRIOR

NAME = "expertflow"


class Foreseen(NamedTuple):
    """Who is predicted to be used by a layer to come."""

    layer: int
    experts: tuple[int, ...]
    """Those of most rows first."""
    absent: tuple[int, ...]
    """Those of them that were not resident when they were predicted."""


class Horizon(NamedTuple):
    """ExpertFlow's step size S: how many layers ahead are prefetched, 1…`most` (the formulas are
    ours)."""

    most: int
    steps: int = 1

    def adjusted(self, late: int, unused: int) -> Horizon:
        """After a layer: one more where it waited for an expert that had been predicted, one fewer
        where experts came for nothing. late: predicted experts that it had to wait for; unused:
        experts that came ahead for it and had no rows."""
        change = 1 if late else -1 if unused else 0
        return self._replace(steps=min(max(self.steps + change, 1), self.most))


class Foreseeing(NamedTuple):
    """State of ExpertFlow."""

    router: np.ndarray
    """float32[L, D, E]"""
    top_k: int
    horizon: Horizon
    recent: np.ndarray
    """bool[L, E]: whom the layer's last rows used."""
    ahead: tuple[Foreseen, ...] = ()
    """The nearest layer first."""
    history: tuple[np.ndarray, ...] = ()
    """int16[N, k] of the layers of this step that were routed, the last one first."""


@dataclasses.dataclass(frozen=True)
class ExpertFlow:
    """ExpertFlow (Shen et al., arXiv:2510.26730): at each layer's routing a random forest sets
    right what the gates of the layers within the step size S say of this layer's input, by the
    choices here and in the layers before. Everybody whom some row is predicted to choose is wanted,
    the nearest layer first. S begins at 1, grows by one where a layer misses an expert that was
    predicted, and shrinks where experts came for nothing.

    Residents are on two lists over one pool of cells of all layers: the high one has those that
    their layer's last rows used and those that a layer within S is predicted to need. The least
    recently used of the low one goes, and of the high one only where the low one is empty. Needs
    driver="host". No output bit depends on it: routers that favour residents are an option of
    their own, --cache-aware-routing. What is ours: docs/prescope.md.
    """

    fitted: Fitted
    pool: bool = True
    """False: each layer has cells of its own."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router", "ids", "weights", "version"})
    writes: frozenset[str] = frozenset({"stages", "victim_weights", "prior"})
    victim_weights: tuple[int, int, int] = (1, 0, 1)
    """Recency, below a prior that no recency outweighs."""

    def init(self, spec: Spec) -> Foreseeing:
        """Nobody was seen. Raises ValueError for another model."""
        self.fitted.check(spec)
        assert spec.router is not None
        recent = np.zeros((spec.layers, spec.experts), bool)
        return Foreseeing(spec.router, spec.top_k, Horizon(self.fitted.setting("reach")), recent)

    def decide(self, state: Foreseeing, observation: Observation) -> tuple[Foreseeing, Decision]:
        seen: Any = observation
        layer, here, there = seen.layer, seen.ids[:, 0], seen.version >= 0
        used = np.zeros(there.shape[1], bool)
        used[here] = True
        if layer == 0:  # what was left of a step that ended early
            state = state._replace(ahead=(), history=())
        state = _judged(state, layer, used, there[layer])
        recent = state.recent.copy()
        recent[layer] = used
        now = Seen(finite(seen.gate_input[:, 0]), here, seen.weights[:, 0], state.history)
        ahead = tuple(
            self._foreseen(state, now, layer, later, there[later])
            for later in range(layer + 1, min(layer + 1 + state.horizon.steps, len(state.router)))
        )
        state = state._replace(recent=recent, ahead=ahead, history=(here, *state.history)[:HISTORY])
        prior = np.where(recent, np.int32(MAX_PRIOR), np.int32(0))
        for each in ahead:
            prior[each.layer, list(each.experts)] = MAX_PRIOR
        stages = [stage for each in ahead for stage in stages_of(each.layer, [*each.experts], NAME)]
        return state, Decision(stages=tuple(stages), prior=prior)

    def _foreseen(
        self, state: Foreseeing, now: Seen, layer: int, later: int, there: np.ndarray
    ) -> Foreseen:
        said = gate_scores(now.gate_input, state.router[later])
        found = scores(self.fitted.arrays, layer, later - layer, now, said)
        experts = tuple(chosen_by_rows(found, state.top_k))
        before = [set(each.absent) for each in state.ahead if each.layer == later]
        known = before[0] if before else set()
        absent = tuple(expert for expert in experts if expert in known or not there[expert])
        return Foreseen(later, experts, absent)


def _judged(state: Foreseeing, layer: int, used: np.ndarray, there: np.ndarray) -> Foreseeing:
    """The state with the step size after what came of the layer's prediction. used, there: bool[E]
    of that layer."""
    horizon = state.horizon
    for each in state.ahead:
        if each.layer == layer:
            late = sum(bool(used[expert] and not there[expert]) for expert in each.experts)
            unused = sum(bool(there[expert] and not used[expert]) for expert in each.absent)
            horizon = horizon.adjusted(late, unused)
    return state._replace(horizon=horizon)


def read(path: str) -> ExpertFlow:
    """The policy with the forests that `moejax train-predictor --predictor forest` wrote."""
    return ExpertFlow(read_fitted(path, NAME))
