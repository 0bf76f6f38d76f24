"""Least frequently used."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Moment, Observation, Spec


@dataclasses.dataclass(frozen=True)
class LFU:
    """Evicts the expert that the fewest references of the layer needed since the start, of equals
    the least recently used. Weights only, as LRU."""

    moments: frozenset[Moment] = frozenset()
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"victim_weights"})
    victim_weights: tuple[int, int, int] = (0, 1, 0)

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()
