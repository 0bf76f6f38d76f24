"""Policies that are nothing but the weights of the victim's key: the device does the rest, and
nothing runs on the host; but for those over one pool, whose cells host_offload.control.pool hands
from layer to layer."""

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

    def decide(self, state: None, seen: Observation) -> tuple[None, Decision]:
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


@dataclasses.dataclass(frozen=True)
class _Pooled(_WeightsOnly):
    """Asked between layers, where it has nothing to say, since cells are handed over there."""

    moments: frozenset[Moment] = frozenset({Moment.EXPERTS_BEGIN})
    pool: bool = True


@dataclasses.dataclass(frozen=True)
class GlobalLRU(_Pooled):
    """Evicts the expert of all layers that was not used for longest. Layers run in order, so that
    is one of those that are needed next; fMoE (arXiv:2502.05370, section 4.5) gives this reason for
    its cache without recency."""

    victim_weights: tuple[int, int, int] = LRU.victim_weights


@dataclasses.dataclass(frozen=True)
class GlobalLFU(_Pooled):
    """Evicts the expert of all layers that the fewest references needed since the start, of equals
    the least recently used."""

    victim_weights: tuple[int, int, int] = LFU.victim_weights


@dataclasses.dataclass(frozen=True)
class GlobalLFRU(_Pooled):
    """As LFRU, over all layers."""

    victim_weights: tuple[int, int, int] = LFRU.victim_weights
