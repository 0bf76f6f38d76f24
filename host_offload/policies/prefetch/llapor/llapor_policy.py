"""LLaPor as a prefetch: whom each row will choose in a later layer, by a network of this one."""

from __future__ import annotations

import dataclasses
from typing import Any

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, read_fitted
from host_offload.policies.prefetch.llapor.llapor_network import of_layer, scores
from host_offload.policies.prefetch.next_layers import Predicted, finite, with_predicted

NAME = "learned"


@dataclasses.dataclass(frozen=True)
class Learned:
    """The Learnable Layer-aware Predictor of PreScope (section 4.2): what the router of a layer saw
    and chose predicts the experts of the layer `stride` on. Everybody whom some row is predicted to
    choose is wanted, those of most rows first. The first `stride` layers have no prediction. Needs
    driver="host". What is ours: docs/prescope.md.
    """

    fitted: Fitted

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "ids", "weights"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Predicted:
        """No layer is predicted yet. Raises ValueError for another model."""
        self.fitted.check(spec)
        return Predicted(spec.top_k)

    def decide(self, state: Predicted, observation: Observation) -> tuple[Predicted, Decision]:
        seen: Any = observation
        stride, found = self.fitted.setting("stride"), None
        if own := of_layer(self.fitted.arrays, seen.layer):
            inputs = finite(seen.gate_input[:, 0]), seen.ids[:, 0], seen.weights[:, 0]
            found = scores(own, *inputs)
        return with_predicted(state, seen.layer, stride, found, NAME)


def read(path: str) -> Learned:
    """The policy with the networks that `moejax train-predictor`, or a fit, wrote to the file."""
    return Learned(read_fitted(path, NAME))
