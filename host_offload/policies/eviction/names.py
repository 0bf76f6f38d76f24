"""Eviction by name: policies that say which expert makes room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host_offload.control.interface import Policy
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.lfru import LFRU
from host_offload.policies.eviction.lfu import LFU
from host_offload.policies.eviction.lru import LRU
from host_offload.policies.eviction.static import Static

EVICTION: dict[str, tuple[int, int, int]] = {
    "lru": LRU().victim_weights,
    "lfu": LFU().victim_weights,
    "lfru": LFRU().victim_weights,
}
"""Name → weights of pallas_kernels.plan.victim_key, of the policies that are nothing else."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "lfru": LFRU,
    "fifo": FIFO,
    "static": Static,
}
"""Name → policy: what LLM(eviction=…) and --eviction take."""


def victim_weights(eviction: str) -> tuple[int, int, int]:
    """The weights of a policy that is only weights, by name. Raises ValueError naming the known
    ones."""
    if eviction not in EVICTION:
        raise ValueError(f"unknown eviction policy {eviction!r}; known: {', '.join(EVICTION)}")
    return EVICTION[eviction]


def eviction_policy(eviction: str) -> Policy:
    """The policy of that name. Raises ValueError naming the known ones."""
    if eviction not in POLICIES:
        raise ValueError(f"unknown eviction policy {eviction!r}; known: {', '.join(POLICIES)}")
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
