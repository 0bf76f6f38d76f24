"""Eviction by name: policies that say which expert makes room."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from host_offload.control.interface import Policy
from pallas_kernels.option_text import unknown

POLICIES: dict[str, Callable[[], Any]] = {
    name: pkgutil.resolve_name(f"{__package__}.{place}")
    for name, place in {
        "lru": "weights:LRU",
        "lfu": "weights:LFU",
        "lfru": "weights:LFRU",
        "global-lru": "weights:GlobalLRU",
        "global-lfu": "weights:GlobalLFU",
        "global-lfru": "weights:GlobalLFRU",
        "fifo": "fifo:FIFO",
        "static": "static:Static",
        "hot-table": "hot_table:HotTable",
    }.items()
}
"""Name → policy with victim_weights, whose victim is the smallest w0·(−log2 age) +
w1·log2(1 + frequency) + w2·prior: what LLM(eviction=…) and --eviction take. A new one is a file of
its own and a line here."""

EVICTION: dict[str, tuple[int, int, int]] = {
    name: policy.victim_weights
    for name, policy in ((name, make()) for name, make in POLICIES.items())
    if not policy.moments
}
"""Name → weights of pallas_kernels.plan.victim_key, of the policies that are nothing else."""


def eviction_policy(eviction: str) -> Policy:
    """The policy of that name. Raises ValueError naming the known ones."""
    if eviction not in POLICIES:
        raise ValueError(unknown("eviction policy", eviction, POLICIES))
    return POLICIES[eviction]()


def with_eviction(
    eviction: str | None, policies: Sequence[Policy]
) -> tuple[str, tuple[Policy, ...]]:
    """(name of what decides eviction, all policies). eviction None: a policy that writes
    victim_weights, where there is one, else LRU. Raises ValueError for an unknown name."""
    if not isinstance(policies, list | tuple):
        raise ValueError(f"policies must be a list of policies, not {type(policies).__name__}")
    if eviction is None:
        for policy in policies:
            writes = getattr(policy, "writes", None)
            if isinstance(writes, frozenset) and "victim_weights" in writes:
                return type(policy).__name__, tuple(policies)
        eviction = "lru"
    return eviction, (eviction_policy(eviction), *policies)
