"""Eviction by name: policies that say which expert makes room."""

from __future__ import annotations

from collections.abc import Sequence

from host_offload.control.interface import Policy
from host_offload.control.rules import name_of
from host_offload.policies.registry import Registry

POLICIES = Registry(
    "eviction policy",
    __package__,
    {
        "lru": "weights:LRU",
        "lfu": "weights:LFU",
        "lfru": "weights:LFRU",
        "global-lru": "weights:GlobalLRU",
        "global-lfu": "weights:GlobalLFU",
        "global-lfru": "weights:GlobalLFRU",
        "fifo": "fifo:FIFO",
        "static": "static:Static",
        "hot-table": "static:HotTable",
    },
)
"""The names of LLM(eviction=…) and --eviction → policy with victim_weights, whose victim is the
smallest w0·(−log2 age) + w1·log2(1 + frequency) + w2·prior."""

EVICTION: dict[str, tuple[int, int, int]] = {
    name: policy.victim_weights
    for name, policy in ((name, make()) for name, make in POLICIES.items())
    if not policy.moments
}
"""Name → weights of pallas_kernels.plan.victim_key, for policies that consist of weights only."""


def with_eviction(
    eviction: str | None, policies: Sequence[Policy]
) -> tuple[str, tuple[Policy, ...]]:
    """(name of the policy that decides eviction, all policies).

    - `eviction`: None: a policy that writes victim_weights, if there is one, otherwise LRU.

    Raises ValueError for an unknown name.
    """
    if not isinstance(policies, list | tuple):
        raise ValueError(f"policies must be a list of policies, not {type(policies).__name__}")
    if eviction is None:
        for policy in policies:
            writes = getattr(policy, "writes", None)
            if isinstance(writes, frozenset) and "victim_weights" in writes:
                return name_of(policy), tuple(policies)
        eviction = "lru"
    return eviction, (POLICIES.parse(eviction), *policies)
