"""Eviction policies: three integers that weigh recency, log frequency and prior in the step."""

from __future__ import annotations

EVICTION: dict[str, tuple[int, int, int]] = {
    "lru": (1, 0, 0),
    "lfu": (0, 1, 0),
}
"""Name → weights of pallas_kernels.plan.victim_key. `lru`: least recently used (WiSP, Algorithm 1).
`lfu`: least often active since the start, the least recently used of equals."""


def victim_weights(eviction: str) -> tuple[int, int, int]:
    """The weights of a policy by name. Raises ValueError naming the known ones."""
    if eviction not in EVICTION:
        raise ValueError(f"unknown eviction policy {eviction!r}; known: {', '.join(EVICTION)}")
    return EVICTION[eviction]
