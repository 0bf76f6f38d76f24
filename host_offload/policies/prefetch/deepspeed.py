"""DeepSpeed, as fMoE describes it and as its own code does it."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State, stages_at
from host_offload.policies.eviction.weights import LFU

ABSENT = int(State.ABSENT)


@dataclasses.dataclass(frozen=True)
class DeepSpeedInference(LFU):
    """DeepSpeed-Inference (Aminabadi et al. 2022, arXiv:2207.00032) as fMoE describes it in section
    6.1: expert-agnostic, "pure on-demand loading", no prefetch, with the expert cache that fMoE
    added.

    The paper does not say which cache. It was built on MoE-Infinity's code, whose cache is by
    frequency, so the least frequently used expert is evicted. The policy runs with both drivers.
    """


@dataclasses.dataclass(frozen=True)
class LayerStreaming:
    """Wants all experts of a layer before it runs, whatever the router will choose, as DeepSpeed's
    code fetches modules: deepspeed/runtime/zero/partitioned_param_coordinator.py of
    deepspeedai/DeepSpeed, commit 00a31c9.

    Absent experts come first, so a layer that does not fit streams through its cells in each step.
    Needs driver="host". What differs from the code: docs/explanation/policies.md.
    """

    moments: frozenset[Moment] = frozenset({Moment.LAYER_BEGIN})
    needs: frozenset[str] = frozenset({"state"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, seen: Observation) -> tuple[None, Decision]:
        order = np.argsort(seen.state[seen.layer] != ABSENT, kind="stable")
        return None, Decision(stages=stages_at(seen.layer, order, "layer-streaming"))
