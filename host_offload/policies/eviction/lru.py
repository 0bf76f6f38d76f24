"""Least recently used."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Moment, Observation, Spec


@dataclasses.dataclass(frozen=True)
class LRU:
    """Evicts the expert of the layer that was not used for longest (WiSP, Algorithm 1). Weights
    only: the device does the rest, and nothing runs on the host."""

    moments: frozenset[Moment] = frozenset()
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"victim_weights"})
    victim_weights: tuple[int, int, int] = (1, 0, 0)

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()
