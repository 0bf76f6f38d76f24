"""Prefetch by name: policies that choose experts to copy before they are needed
(docs/explanation/policies.md)."""

from __future__ import annotations

from collections.abc import Sequence

from host_offload.control.interface import Policy
from host_offload.policies.registry import Registry

PREFETCH = Registry(
    "prefetch policy",
    __package__,
    {
        "coactivation": "coactivation:CoActivation",
        "deepspeed": "deepspeed:DeepSpeedInference",
        "expert_map": "expert_map.expert_map_policy:ExpertMap",
        "expert_map_in_step": "expert_map.in_step:ExpertMapInStep",
        "expertflow": "expertflow:ExpertFlow",
        "fate": "fate:Fate",
        "fluxmoe": "fluxmoe:FluxMoE",
        "layer-streaming": "deepspeed:LayerStreaming",
        "learned": "llapor:Learned",
        "learned_online": "llapor_online:LearnedOnline",
        "mixtral-offloading": "mixtral_offloading:MixtralOffloading",
        "moe-infinity": "moe_infinity:MoEInfinity",
        "oracle": "oracle:Oracle",
        "promoe": "promoe:ProMoE",
        "random": "random_prefetch:RandomPrefetch",
        "tokens": "tokens:TokenPrefetch",
    },
)
"""The names of LLM(prefetch=…) and --prefetch, as NAME or NAME=PATH."""


def with_prefetch(prefetch: str | None, policies: Sequence[Policy]) -> Sequence[Policy]:
    """Adds the named prefetch policy to the policies; None adds none. Raises ValueError as
    Registry.parse does."""
    return policies if prefetch is None else (*policies, PREFETCH.parse(prefetch))
