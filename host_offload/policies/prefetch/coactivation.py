"""WiSP's co-activation prefetch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, fit_of
from host_offload.policies.prefetch.next_layers import rank_chosen, stages_of
from host_offload.sizing.coactivation_counts import (
    REACH,
    coactivation_counts,
    likelihoods,
    pair_counts,
)
from host_offload.traces.reader import Trace

NAME = "coactivation"


class Counted(NamedTuple):
    """State of CoActivation."""

    top_k: int
    pairs: tuple[np.ndarray, ...]
    """Each layer's float32[reach, E, E], see sizing.coactivation."""
    fired: tuple[np.ndarray, ...] = ()
    """int[N, k] of the latest layers of this step: the chosen experts."""


@dataclasses.dataclass(frozen=True)
class CoActivation:
    """Prefetches the experts of the next layer that co-activation counts predict (WiSP, Appendix
    C): P(j in l' | i in l) = n[(l,i)→(l',j)] / n[(l,i)], and the score of j is
    Σ_{l < l'} decay^(l'−l−1) · Σ_{i chosen in l} P(j | i).

    Counts are of tokens, over all steps so far, beginning with those of `fitted` (see `fit`). Each
    row's best top-k are wanted, experts of most rows first. `decay` and `reach` are ours, since the
    paper gives no values. The first layer has no prediction. Needs driver="host".
    """

    fitted: Fitted | None = None
    decay: float = 0.5
    reach: int = REACH

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"ids"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Counted:
        """The fitted counts, or none. Raises ValueError for counts of another model."""
        if not 0 < self.decay <= 1 or self.reach < 1:
            raise ValueError(
                f"decay must lie in (0, 1] and reach be at least 1, not {self.decay} and "
                f"{self.reach}"
            )
        if self.fitted is None:
            empty = np.zeros((self.reach, spec.experts, spec.experts), np.float32)
            return Counted(spec.top_k, (empty,) * spec.layers)
        self.fitted.check(spec)
        pairs = self.fitted.array("pairs", spec.layers, -1, spec.experts, spec.experts)
        if pairs.shape[1] != self.reach:
            raise ValueError(f"reach {self.reach} is not that of the counts, {pairs.shape[1]}")
        return Counted(spec.top_k, tuple(pairs))

    def decide(self, state: Counted, seen: Observation) -> tuple[Counted, Decision]:
        layer = seen.layer
        experts = state.pairs[0].shape[1]
        before = state.fired[-self.reach :] if layer else ()
        fired = (*before, seen.ids[:, 0])
        pairs = list(state.pairs)
        if before:
            pairs[layer] = pairs[layer].copy()
            for counts, earlier in zip(pairs[layer], reversed(before), strict=False):
                counts += pair_counts(earlier, fired[-1], experts)
        state = Counted(state.top_k, tuple(pairs), fired)
        if layer + 1 == len(pairs):
            return state, Decision(stages=())
        scores = np.zeros((len(seen.ids), experts), np.float32)
        for d, chosen in enumerate(fired[: -self.reach - 1 : -1]):
            likely = likelihoods(pairs[layer + 1][d], state.top_k)
            scores += self.decay**d * likely[chosen].sum(axis=1)  # see pair_counts
        # Experts that were never seen together with them are not predicted.
        wanted = [e for e in rank_chosen(scores, state.top_k) if scores[:, e].any()]
        return state, Decision(stages=stages_of(layer + 1, wanted, NAME))


def fit(trace: Trace, *, reach: int = REACH, decay: float = 0.5) -> CoActivation:
    """CoActivation that begins with the counts of a trace."""
    header = trace.header
    pairs = np.zeros((header.layers, reach, header.experts, header.experts), np.float32)
    for chunk in trace.chunks:
        pairs += coactivation_counts(chunk.array("token.ids"), header.experts, reach)
    found = fit_of(NAME, header, {"pairs": pairs}, {"reach": reach})
    return CoActivation(fitted=found, decay=decay, reach=reach)
