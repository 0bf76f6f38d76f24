"""What says which experts come (fMoE, section 6.5, "expert pattern tracking"): expert maps, the
gate of a later layer, or counts of earlier requests, all in the place of the matcher.

A tracker is a value: each method returns the next one. It learns and searches, and decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from host_offload.control.interface import Moment, Observation, routed_counts
from host_offload.policies.prefetch.expert_map.map_store import (
    MapStore,
    Trajectory,
    semantic_scores,
    with_rows,
)
from host_offload.policies.prefetch.moe_infinity import popular_experts, shares, similarity
from host_offload.policies.prefetch.next_layers import gate_scores, softmax

TRACKERS = ("map_tsd", "map_ts", "map_t", "speculate", "hit_count")
"""Map (T+S+δ), Map (T+S), Map (T), Speculate and Hit count."""

NEEDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(TRACKERS[:3], frozenset({"request", "phase", "embedding", "probs"})),
    "speculate": frozenset({"gate_input", "router"}),
    "hit_count": frozenset({"request", "ids"}),
}


class MapPrediction(NamedTuple):
    """What some layers to come are likely to need."""

    layers: range
    likely: np.ndarray
    """float32[M, N, E]: probabilities, of M layers and N rows."""
    scores: np.ndarray
    """float32[N]: how alike each row is to what it was taken from; 1: as sure as can be."""


class Tracker(Protocol):
    def seen(self, observation: Observation) -> tuple[Tracker, MapPrediction | None]:
        """The tracker after a moment, and what it predicts there. After EMBEDDED and ROUTED the
        others may be left out: what is learned is learned at STEP_END and TURN_END."""
        ...

    @property
    def nbytes(self) -> int:
        """What was learned so far."""
        ...


@dataclasses.dataclass(frozen=True)
class MapTracker:
    """Expert maps: the semantic search for the first `distance` layers, the trajectory search for
    the layer `distance` behind each router."""

    store: MapStore
    trajectory: Trajectory
    """The rows of the step that is made."""
    capacity: int
    distance: int
    semantic: bool
    learns: bool
    prompt: str

    def seen(self, observation: Observation) -> tuple[MapTracker, MapPrediction | None]:
        seen: Any = observation
        if observation.moment == Moment.TURN_END:
            return self, None
        rows = _Rows.of(seen, self.prompt)
        if observation.moment == Moment.STEP_END:
            return self._learned(rows, seen) if self.learns else self, None
        store = self.store
        known = bool(store.size and rows.count)
        if observation.moment == Moment.EMBEDDED:
            after = dataclasses.replace(self, trajectory=Trajectory.of(store, rows.count))
            if not (known and self.semantic):
                return after, None
            scores = semantic_scores(store, rows.mean(seen.embedding))
            return after, self._nearest(range(self.distance), scores)
        trajectory = self.trajectory.after(store, seen.layer, rows.mean(seen.probs)[:, 0])
        after, target = dataclasses.replace(self, trajectory=trajectory), seen.layer + self.distance
        if not known or target >= len(store.maps):
            return after, None
        scores = trajectory.scores(store, seen.layer)
        return after, self._nearest(range(target, target + 1), scores)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.store)

    def _nearest(self, layers: range, scores: np.ndarray) -> MapPrediction:
        """What the nearest map of each row, by scores float32[N, n], says of the layers."""
        nearest = np.argmax(scores, axis=1)
        best = scores[np.arange(len(scores)), nearest]
        return MapPrediction(layers, self.store.maps[layers.start : layers.stop, nearest], best)

    def _learned(self, rows: _Rows, seen: Any) -> MapTracker:
        given = rows.mean(seen.embedding), rows.mean(seen.probs)
        settings = {"capacity": self.capacity, "distance": self.distance}
        return dataclasses.replace(self, store=with_rows(self.store, *given, **settings))


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The gate of the layer `distance` behind each router, on what that router saw (the speculative
    prediction of Mixtral-Offloading and ProMoE, without learning)."""

    router: np.ndarray
    """float32[L, D, E]"""
    distance: int
    nbytes: int = 0

    def seen(self, observation: Observation) -> tuple[Speculation, MapPrediction | None]:
        seen: Any = observation
        target = seen.layer + self.distance
        if observation.moment != Moment.ROUTED or target >= len(self.router):
            return self, None
        likely = softmax(gate_scores(seen.gate_input[:, 0], self.router[target]))
        sure = np.ones(len(likely), np.float32)
        return self, MapPrediction(range(target, target + 1), likely[None], sure)


@dataclasses.dataclass(frozen=True)
class HitCounts:
    """Counts of requests (MoE-Infinity): the nearest earlier request, by the counts so far of each
    request of the step, for the layer `distance` behind each router; what was popular for the first
    `distance` layers."""

    collection: np.ndarray
    """float32[n, L, E]: shares of requests that ended."""
    capacity: int
    distance: int
    top_k: int
    learns: bool
    running: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """Request → tokens routed to each expert in the steps before, int64[L, E]."""
    step: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """As running, with the step that is made."""

    def seen(self, observation: Observation) -> tuple[HitCounts, MapPrediction | None]:
        seen: Any = observation
        layers, experts = self.collection.shape[1:]
        match observation.moment:
            case Moment.EMBEDDED:
                after = dataclasses.replace(self, step={**self.running})
                popular = popular_experts(self.collection, self.distance, self.top_k)
                if not len(self.collection):
                    return after, None
                likely = popular[: self.distance, None].astype(np.float32) / len(self.collection)
                return after, MapPrediction(range(self.distance), likely, np.ones(1, np.float32))
            case Moment.ROUTED:
                step = {**self.step}
                for request in np.unique(seen.request).tolist():
                    matrix = step.get(request, np.zeros((layers, experts), np.int64)).copy()
                    matrix[seen.layer] += routed_counts(seen.ids[seen.request == request], experts)[
                        0
                    ]
                    step[request] = matrix
                after, target = dataclasses.replace(self, step=step), seen.layer + self.distance
                if target >= layers or not len(self.collection) or not len(seen.request):
                    return after, None
                nearest = [
                    int(np.argmax(similarity(self.collection, shares(step[request]))))
                    for request in np.unique(seen.request).tolist()
                ]
                sure = np.ones(len(nearest), np.float32)
                found = self.collection[nearest, target]
                return after, MapPrediction(range(target, target + 1), found[None], sure)
            case Moment.STEP_END:
                running = {**self.running}
                for request in np.unique(seen.request).tolist():
                    counts = routed_counts(seen.ids[seen.request == request], experts)
                    running[request] = running.get(request, 0) + counts
                return dataclasses.replace(self, running=running), None
        return self._ended(observation.turn), None

    @property
    def nbytes(self) -> int:
        return self.collection.nbytes

    def _ended(self, request: int) -> HitCounts:
        """The request's counts are kept; the oldest ones go."""
        running = {**self.running}
        matrix = running.pop(request, None)
        collection = self.collection
        if matrix is not None and self.learns:
            collection = np.concatenate([collection, shares(matrix)[None]])[-self.capacity :]
        return dataclasses.replace(self, running=running, collection=collection)


class _Rows(NamedTuple):
    """How a step's tokens become rows."""

    group: np.ndarray | None
    """int[tokens]: the row of each; None: each is one."""
    count: int

    @classmethod
    def of(cls, seen: Any, prompt: str) -> _Rows:
        """seen: `request` and `phase` of a step, which is of prompts or of generated tokens."""
        if prompt == "tokens" or np.all(seen.phase):
            return cls(None, len(seen.request))
        requests, group = np.unique(seen.request, return_inverse=True)
        return cls(group, len(requests))

    def mean(self, values: np.ndarray) -> np.ndarray:
        """float[rows, …] of float[tokens, …]."""
        if self.group is None:
            return values
        sums = np.zeros((self.count, *values.shape[1:]), np.float32)
        np.add.at(sums, self.group, values.astype(np.float32))
        sizes = np.bincount(self.group).astype(np.float32)
        return sums / sizes.reshape(-1, *[1] * (values.ndim - 1))
