"""WiSP's co-activation prefetch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, fitted, read_fitted
from host_offload.policies.prefetch.next_layers import chosen_by_rows, stages_of
from host_offload.traces.reader import Trace

NAME = "coactivation"


class Counted(NamedTuple):
    """State of CoActivation."""

    top_k: int
    pairs: tuple[np.ndarray, ...]
    """Of each layer float32[reach, E, E]: [d, i, j] counts tokens that chose expert i in the layer
    d + 1 before, and j in this one."""
    fired: tuple[np.ndarray, ...] = ()
    """Of the layers routed last in this step float32[N, E]: 1 for who was chosen."""


@dataclasses.dataclass(frozen=True)
class CoActivation:
    """Prefetches for the next layer whom co-activation counts predict (WiSP, Appendix C):
    P(j in l' | i in l) = n[(l,i)→(l',j)] / n[(l,i)], and the score of j is
    Σ_{l < l'} decay^(l'−l−1) · Σ_{i chosen in l} P(j | i).

    Counts are of tokens, from all steps so far, beginning with those of `fitted` if there are some
    (see `fit`). Each row's best top-k are wanted, those of most rows first. Ours: the decay, whose
    value the paper's text has lost, and `reach`, since the farthest layers weigh next to nothing.
    The first layer has no prediction. Needs driver="host".
    """

    fitted: Fitted | None = None
    decay: float = 0.5
    reach: int = 4
    """Layers that are looked back."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"ids"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Counted:
        """The counts that are given, or none. Raises ValueError for another model."""
        if not 0 < self.decay <= 1 or self.reach < 1:
            raise ValueError(
                f"decay must lie in (0, 1] and reach be at least 1, not {self.decay} and "
                f"{self.reach}"
            )
        if self.fitted is None:
            empty = np.zeros((self.reach, spec.experts, spec.experts), np.float32)
            return Counted(spec.top_k, (empty,) * spec.layers)
        self.fitted.check(spec)
        pairs = self.fitted.arrays["pairs"]
        if pairs.shape[1] != self.reach:
            raise ValueError(f"reach {self.reach} is not that of the counts, {pairs.shape[1]}")
        return Counted(spec.top_k, tuple(pairs))

    def decide(self, state: Counted, observation: Observation) -> tuple[Counted, Decision]:
        seen: Any = observation
        layer = seen.layer
        experts = state.pairs[0].shape[1]
        before = state.fired[-self.reach :] if layer else ()
        fired = (*before, _one_hot(seen.ids[:, 0], experts))
        pairs = list(state.pairs)
        if before:
            pairs[layer] = _counted(pairs[layer], fired)
        state = Counted(state.top_k, tuple(pairs), fired)
        if layer + 1 == len(pairs):
            return state, Decision(stages=())
        scores = np.zeros((len(seen.ids), experts), np.float32)
        for d, chosen in enumerate(fired[: -self.reach - 1 : -1]):
            # Every token chooses top-k experts, so the sum over j counts each firing of i so often.
            together = pairs[layer + 1][d]
            alone = together.sum(axis=1, keepdims=True) / state.top_k
            likely = np.divide(together, alone, out=np.zeros_like(together), where=alone > 0)
            scores += self.decay**d * (chosen @ likely)
        # Who was never seen together with them is no prediction.
        wanted = [e for e in chosen_by_rows(scores, state.top_k) if scores[:, e].any()]
        return state, Decision(stages=stages_of(layer + 1, wanted, NAME))


def fit(trace: Trace, *, reach: int = 4, decay: float = 0.5) -> CoActivation:
    """CoActivation that begins with the counts of a trace."""
    header = trace.header
    shape = header.layers, reach, header.experts, header.experts
    pairs = np.zeros(shape, np.float32)
    for step in trace.step_traces():
        fired = [_one_hot(step.ids[:, layer], header.experts) for layer in range(header.layers)]
        for layer in range(1, header.layers):
            pairs[layer] = _counted(pairs[layer], fired[max(0, layer - reach) : layer + 1])
    found = fitted(NAME, header, {"pairs": pairs}, reach=reach)
    return CoActivation(fitted=found, decay=decay, reach=reach)


def read(path: str) -> CoActivation:
    """The policy with the counts that a fit wrote to the file."""
    state = read_fitted(path, NAME)
    return CoActivation(fitted=state, reach=state.setting("reach"))


def _one_hot(ids: np.ndarray, experts: int) -> np.ndarray:
    """float32[N, E] of ids [N, k]."""
    hot = np.zeros((len(ids), experts), np.float32)
    np.put_along_axis(hot, ids.astype(np.int64), 1, axis=1)
    return hot


def _counted(pairs: np.ndarray, fired: Any) -> np.ndarray:
    """pairs [reach, E, E] of a layer and its tokens; fired: of the layers up to this one."""
    pairs = pairs.copy()
    for d, source in enumerate(fired[-2::-1]):
        pairs[d] += source.T @ fired[-1]
    return pairs
