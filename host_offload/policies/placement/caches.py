"""Residents that change while layers run, and how far ahead is looked: what rivals of PreScope have
in place of a static hot table, as frozen values of events. docs/prescope.md has the sources.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Protocol, Self

import numpy as np

from host_offload.policies.placement.buffers import Key

MRS_ALPHA = 0.5
"""HybriMoE's weight of the newest scores (`KScoreAwareCache` as modeling_deepseek.py makes it)."""

MRS_TOP = 2
"""How many scores of a layer count in HybriMoE, in units of top-k (the same place)."""


class Cache(Protocol):
    """Who is resident, or on its way to a place of its own."""

    @property
    def resident(self) -> np.ndarray:
        """bool[L, E]"""
        ...

    def routed(self, layer: int, tokens: np.ndarray, ahead: Collection[Key]) -> Self:
        """With a layer routed: tokens int[E] rows of each expert, ahead: who of later layers is
        predicted."""
        ...

    def victim(self, key: Key, kept: Collection[Key]) -> Key | None:
        """Who makes room for an expert that is to come; nobody of `kept`. None: nobody can."""
        ...

    def swapped(self, victim: Key, key: Key) -> Self:
        """With the expert in the victim's place."""
        ...


@dataclasses.dataclass(frozen=True)
class _Table:
    """Places that experts take from each other."""

    resident: np.ndarray

    def swapped(self, victim: Key, key: Key) -> Self:
        """With the expert in the victim's place. Raises ValueError for a victim that is not there,
        or an expert that is."""
        if not self.resident[victim] or self.resident[key]:
            raise ValueError(f"expert {key} cannot take the place of {victim}")
        resident = self.resident.copy()
        resident[victim], resident[key] = False, True
        return dataclasses.replace(self, resident=resident)

    def _candidates(self, layer: int | None, kept: Collection[Key]) -> np.ndarray:
        """int[N, 2]: (layer, expert) of residents that may go; layer None: of all."""
        may = self.resident.copy()
        if layer is not None:
            may[np.arange(len(may)) != layer] = False
        for key in kept:
            may[key] = False
        return np.argwhere(may)


@dataclasses.dataclass(frozen=True)
class ScoreCache(_Table):
    """HybriMoE's cache: the resident of the layer with the least score goes ("minus recent score").
    A layer's score is S = α · TopP(s) + (1 − α) · S, where s are the newest scores and TopP leaves
    the `top` largest of them (`KScoreAwareCache` in ktransformers/operators/experts.py of
    PKU-SEC-Lab/HybriMoE, 508a85b9).

    Ours: s is the expert's share of the step's uses, since traces have no router scores of all
    experts; the code takes the softmax scores of the first row, and counts one row.
    """

    scores: np.ndarray
    """float64[L, E]"""
    top: int
    alpha: float = MRS_ALPHA

    @classmethod
    def of(cls, resident: np.ndarray, top_k: int) -> ScoreCache:
        """Nobody has a score."""
        return cls(resident, np.zeros(resident.shape), min(MRS_TOP * top_k, resident.shape[1]))

    def routed(self, layer: int, tokens: np.ndarray, ahead: Collection[Key]) -> ScoreCache:
        share = tokens / max(int(tokens.sum()), 1)
        best = np.argsort(-share, kind="stable")[: self.top]
        scores = self.scores.copy()
        scores[layer] *= 1 - self.alpha
        scores[layer, best] += self.alpha * share[best]
        return dataclasses.replace(self, scores=scores)

    def victim(self, key: Key, kept: Collection[Key]) -> Key | None:
        may = self._candidates(key[0], kept)
        if not len(may):
            return None
        layer, expert = may[np.argmin(self.scores[tuple(may.T)])]
        return int(layer), int(expert)


@dataclasses.dataclass(frozen=True)
class LayerLru(_Table):
    """The least recently used resident of the layer goes: a plain cache, for Fate."""

    last: np.ndarray
    """int64[L, E]: when its layer last used it."""
    clock: int = 0

    @classmethod
    def of(cls, resident: np.ndarray, top_k: int) -> LayerLru:
        """Nobody was used."""
        return cls(resident, np.zeros(resident.shape, np.int64))

    def routed(self, layer: int, tokens: np.ndarray, ahead: Collection[Key]) -> LayerLru:
        last = self.last.copy()
        last[layer, tokens > 0] = self.clock + 1
        return dataclasses.replace(self, last=last, clock=self.clock + 1)

    def victim(self, key: Key, kept: Collection[Key]) -> Key | None:
        may = self._candidates(key[0], kept)
        if not len(may):
            return None
        layer, expert = may[np.argmin(self.last[tuple(may.T)])]
        return int(layer), int(expert)


@dataclasses.dataclass(frozen=True)
class TwoLevelLru(_Table):
    """ExpertFlow's cache, of which we have the name only (arXiv:2510.26730): two lists by last use
    over one pool of all layers. Ours: on the high one are experts that a layer within the step size
    is predicted to need; the oldest of the low one goes, and of the high one only where that is
    empty and the newcomer is needed by an earlier layer than the victim."""

    last: np.ndarray
    high: np.ndarray
    """bool[L, E]"""
    clock: int = 0
    layer: int = 0
    """That was routed last."""

    @classmethod
    def of(cls, resident: np.ndarray, top_k: int) -> TwoLevelLru:
        """Nobody was used or predicted."""
        return cls(resident, np.zeros(resident.shape, np.int64), np.zeros(resident.shape, bool))

    def routed(self, layer: int, tokens: np.ndarray, ahead: Collection[Key]) -> TwoLevelLru:
        last, high = self.last.copy(), np.zeros_like(self.high)
        last[layer, tokens > 0] = self.clock + 1
        for key in ahead:
            high[key] = True
        return dataclasses.replace(self, last=last, high=high, clock=self.clock + 1, layer=layer)

    def victim(self, key: Key, kept: Collection[Key]) -> Key | None:
        may = self._candidates(None, kept)
        high = self.high[tuple(may.T)]
        nearer = (may[:, 0] > key[0]) if key[0] >= self.layer else np.zeros(len(may), bool)
        for level in (~high, high & nearer):
            some = may[level]
            if len(some):
                layer, expert = some[np.argmin(self.last[tuple(some.T)])]
                return int(layer), int(expert)
        return None


@dataclasses.dataclass(frozen=True)
class Horizon:
    """ExpertFlow's step size S: how many layers ahead are prefetched. It begins with what bandwidth
    and the experts' size say and is adjusted by feedback (the abstract of arXiv:2510.26730; the
    formulas are ours): one more layer where a layer waited for an expert that had been predicted,
    one fewer where experts came for nothing, and S stays in 1…`most`."""

    most: int
    steps: int = 1

    @classmethod
    def of(cls, loads: float, load_s: float, layer_s: float, most: int) -> Horizon:
        """As many layers as pass while one layer's loads are on the link. loads: experts that a
        layer is expected to miss; load_s: seconds of one; layer_s: seconds of a layer that waits
        for nobody. Raises ValueError for a layer that takes no time, or no layer to look at."""
        if layer_s <= 0 or most < 1:
            raise ValueError("a step size needs layers that take time, and at least one of them")
        return cls(most, min(max(math.ceil(loads * load_s / layer_s), 1), most))

    def adjusted(self, late: int, unused: int) -> Horizon:
        """After a layer. late: predicted experts that it had to wait for; unused: experts that
        came ahead for it and had no rows."""
        change = 1 if late else -1 if unused else 0
        return dataclasses.replace(self, steps=min(max(self.steps + change, 1), self.most))
