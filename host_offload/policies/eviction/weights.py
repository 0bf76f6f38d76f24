"""Policies that are nothing but the weights of the victim's key: the device does the rest, and
nothing runs on the host."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Moment, Observation, Spec


@dataclasses.dataclass(frozen=True)
class _WeightsOnly:
    victim_weights: tuple[int, int, int]
    moments: frozenset[Moment] = frozenset()
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"victim_weights"})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()


@dataclasses.dataclass(frozen=True)
class LRU(_WeightsOnly):
    """Evicts the expert of the layer that was not used for longest (WiSP, Algorithm 1)."""

    victim_weights: tuple[int, int, int] = (1, 0, 0)


@dataclasses.dataclass(frozen=True)
class LFU(_WeightsOnly):
    """Evicts the expert that the fewest references of the layer needed since the start, of equals
    the least recently used."""

    victim_weights: tuple[int, int, int] = (0, 1, 0)


@dataclasses.dataclass(frozen=True)
class LFRU(_WeightsOnly):
    """Evicts the expert with the smallest log2(1 + frequency) − log2(age): smallest frequency over
    age, both in references of the layer."""

    victim_weights: tuple[int, int, int] = (1, 1, 0)
