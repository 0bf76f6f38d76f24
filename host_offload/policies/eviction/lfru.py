"""Least frequently and recently used."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Moment, Observation, Spec


@dataclasses.dataclass(frozen=True)
class LFRU:
    """Evicts the expert with the smallest log2(1 + frequency) − log2(age): smallest frequency over
    age, both in references of the layer. Weights only, as LRU."""

    moments: frozenset[Moment] = frozenset()
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"victim_weights"})
    victim_weights: tuple[int, int, int] = (1, 1, 0)

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()
