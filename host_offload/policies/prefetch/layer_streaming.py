"""Layer streaming as DeepSpeed does it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State
from host_offload.policies.prefetch.next_layers import stages_of


@dataclasses.dataclass(frozen=True)
class LayerStreaming:
    """Before each layer all of its experts are wanted, whatever the router will say
    (DeepSpeed-Inference, Aminabadi et al. 2022, arXiv:2207.00032; as a baseline in fMoE, section
    6.1: expert-agnostic, layer-wise, with an expert cache added). Who is absent comes first, so a
    layer that does not fit streams through its cells in each step. Needs driver="host". What
    differs from the paper: docs/policies.md.
    """

    moments: frozenset[Moment] = frozenset({Moment.LAYER_BEGIN})
    needs: frozenset[str] = frozenset({"state"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        seen: Any = observation
        order = np.argsort(seen.state[seen.layer] != State.ABSENT, kind="stable").tolist()
        return None, Decision(stages=stages_of(seen.layer, order, "layer-streaming"))
