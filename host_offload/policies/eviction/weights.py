"""Policies that are only weights of the victim's key: the device does the rest, and nothing runs on
the host. Exception: with one pool over all layers, host_offload.control.pool moves cells between
layers."""

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
    """Evicts the layer's least recently used expert (WiSP, Algorithm 1)."""

    victim_weights: tuple[int, int, int] = (1, 0, 0)


@dataclasses.dataclass(frozen=True)
class LFU(_WeightsOnly):
    """Evicts the layer's least often used expert since the start; of equals, the least recently
    used."""

    victim_weights: tuple[int, int, int] = (0, 1, 0)


@dataclasses.dataclass(frozen=True)
class LFRU(_WeightsOnly):
    """Evicts the expert with the smallest log2(1 + frequency) − log2(age): smallest frequency over
    age, both in references of the layer."""

    victim_weights: tuple[int, int, int] = (1, 1, 0)


@dataclasses.dataclass(frozen=True)
class _Pooled(_WeightsOnly):
    """Asked between layers, so that cells can move there; it decides nothing."""

    moments: frozenset[Moment] = frozenset({Moment.EXPERTS_BEGIN})
    pool: bool = True


@dataclasses.dataclass(frozen=True)
class GlobalLRU(_Pooled):
    """Evicts the least recently used expert of all layers. Layers run in order, so that expert is
    one of those needed next; fMoE (arXiv:2502.05370, section 4.5) gives this reason for its cache
    without recency."""

    victim_weights: tuple[int, int, int] = LRU.victim_weights


@dataclasses.dataclass(frozen=True)
class GlobalLFU(_Pooled):
    """Evicts the least often used expert of all layers since the start; of equals, the least
    recently used."""

    victim_weights: tuple[int, int, int] = LFU.victim_weights


@dataclasses.dataclass(frozen=True)
class GlobalLFRU(_Pooled):
    """LFRU over all layers."""

    victim_weights: tuple[int, int, int] = LFRU.victim_weights
