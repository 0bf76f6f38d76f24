"""fMoE: prefetch by the nearest expert map of earlier iterations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.policies.prefetch.expert_map.store import (
    MapStore,
    Trajectory,
    empty_store,
    selected,
    semantic_scores,
    stored,
    with_rows,
)
from host_offload.policies.prefetch.fitted import Fitted, fitted, read_fitted
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR

NAME = "expert_map"
PROMPTS = ("tokens", "mean")


class Matching(NamedTuple):
    """State of ExpertMap."""

    store: MapStore
    trajectory: Trajectory
    """The rows of the step that is made."""
    wanted: np.ndarray
    """float32[L, E]: probability of what the step is to prefetch, 0: nothing."""
    likely: np.ndarray
    """float32[L, E]: probability as matched last."""
    top_k: int


@dataclasses.dataclass(frozen=True)
class ExpertMap:
    """fMoE, later FineMoE (arXiv:2502.05370, sections 4.1 to 4.5): an iteration leaves the
    router's probabilities of all layers, its map, and the embedding of the token fed in.

    The store's nearest embedding says what the first `distance` layers need; after each router the
    nearest map, over the layers routed so far, what the layer `distance` further on needs. The less
    alike, the more probability is prefetched (store.selected), likely and near experts first; the
    least likely and least often needed are evicted, without recency. Rows of a step are united,
    each probability the largest of theirs. Needs driver="host", which gives `probs` and
    `embedding` to the host. docs/policies.md says what differs from the paper.
    """

    fitted: Fitted | None = None
    """Maps to begin with; without them it begins empty."""
    capacity: int = 1000
    """Most maps (C)."""
    distance: int = 3
    """Layers ahead (d)."""
    semantic: bool = True
    """False: nothing is predicted for the first `distance` layers (the paper's Map (T))."""
    similarity: bool = True
    """False: top-k of the map, whatever the score (the paper's Map (T+S))."""
    prompt: str = "tokens"
    """"tokens": every token of a prompt is a row, with a map; "mean": their mean is one."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED, Moment.STEP_END})
    needs: frozenset[str] = frozenset({"request", "phase", "embedding", "probs"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})
    victim_weights: tuple[int, int, int] = (0, 1, 1)
    """log2(1 + frequency) + log2(probability): the product, which decides in the paper."""

    def init(self, spec: Spec) -> Matching:
        """The store that is given. Raises ValueError for settings that mean nothing and for maps
        of another model."""
        if self.capacity < 1 or self.prompt not in PROMPTS:
            raise ValueError(
                f"capacity must be at least 1, prompt one of {', '.join(PROMPTS)}, not "
                f"{self.capacity} and {self.prompt!r}"
            )
        check_distance(self.distance, spec.layers)
        store = empty_store(spec.layers, spec.experts, spec.hidden)
        if self.fitted is not None:
            self.fitted.check(spec)
            arrays = self.fitted.arrays
            if len(arrays["embeddings"]) > self.capacity:
                raise ValueError(
                    f"{len(arrays['embeddings'])} maps are given and capacity is {self.capacity}; "
                    "fit with a smaller one"
                )
            store = stored(arrays["embeddings"], arrays["maps"])
        nothing = np.zeros((spec.layers, spec.experts), np.float32)
        return Matching(store, Trajectory.of(store, 0), nothing, nothing, spec.top_k)

    def decide(self, state: Matching, observation: Observation) -> tuple[Matching, Decision]:
        seen: Any = observation
        rows = _Rows.of(seen, self.prompt)
        if observation.moment == Moment.STEP_END:
            given = rows.mean(seen.embedding), rows.mean(seen.probs)
            settings = {"capacity": self.capacity, "distance": self.distance}
            return state._replace(store=with_rows(state.store, *given, **settings)), Decision()
        store, layers = state.store, len(state.wanted)
        if observation.moment == Moment.EMBEDDED:
            begun = Trajectory.of(store, rows.count)
            state = state._replace(trajectory=begun, wanted=np.zeros_like(state.wanted))
            if not (store.size and rows.count and self.semantic):
                return state, Decision(stages=())
            scores = semantic_scores(store, rows.mean(seen.embedding))
            return self._matched(state, range(self.distance), scores, -1)
        trajectory = state.trajectory.after(store, seen.layer, rows.mean(seen.probs)[:, 0])
        state = state._replace(trajectory=trajectory)
        target = seen.layer + self.distance
        if not (store.size and rows.count) or target >= layers:
            return state, Decision(stages=_queue(state.wanted, seen.layer))
        scores = trajectory.scores(store, seen.layer)
        return self._matched(state, range(target, target + 1), scores, seen.layer)

    def _matched(
        self, state: Matching, targets: range, scores: np.ndarray, now: int
    ) -> tuple[Matching, Decision]:
        """What the nearest map of each row, by scores float32[N, n], says of the target layers.
        now: the layer that was routed last, −1: none."""
        nearest = np.argmax(scores, axis=1)
        best = scores[np.arange(len(scores)), nearest]
        wanted, likely = state.wanted.copy(), state.likely.copy()
        for layer in targets:
            rows = state.store.maps[layer, nearest]
            chosen = selected(rows, best, state.top_k, by_similarity=self.similarity)
            likely[layer] = rows.max(axis=0)
            wanted[layer] = np.where(chosen, rows, 0).max(axis=0)
        state = state._replace(wanted=wanted, likely=likely)
        least = np.float32(2.0 ** -(MAX_PRIOR // LOG2_UNIT))
        prior = np.log2(np.maximum(likely, least)) * LOG2_UNIT
        return state, Decision(prior=prior.astype(np.int32), stages=_queue(wanted, now))


def _queue(wanted: np.ndarray, now: int) -> tuple[Stage, ...]:
    """What is wanted of layers to come, the largest probability over distance first (section 4.5),
    equal ones by layer and expert."""
    layer, expert = np.nonzero(wanted)
    ahead = layer > now
    layer, expert = layer[ahead], expert[ahead]
    order = np.argsort(-wanted[layer, expert] / (layer - now), kind="stable")
    places = zip(layer[order].tolist(), expert[order].tolist(), strict=True)
    return tuple(Stage(*place, cause=NAME) for place in places)


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


def check_distance(distance: int, layers: int) -> None:
    """Raises ValueError for a distance that leaves no layer to be predicted."""
    if not 1 <= distance < layers:
        raise ValueError(f"distance must lie in 1…{layers - 1}, not {distance}")


def fit(trace: Trace, *, capacity: int = 1000, distance: int = 3) -> ExpertMap:
    """ExpertMap that begins with the maps of a trace, taken in one step after the other as the
    engine does. Raises TraceError for a trace without probabilities or embeddings, ValueError as
    ExpertMap.init."""
    header = trace.header
    if not (header.probabilities and header.embedding):
        raise TraceError(
            f"{trace.directory} has no maps, which {NAME} learns from; record a trace with "
            "--trace-arrays probs,embedding"
        )
    check_distance(distance, header.layers)
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    store = empty_store(header.layers, header.experts, header.embedding)
    for step in trace.step_traces():
        assert step.embedding is not None and step.probabilities is not None
        given = step.embedding, step.probabilities
        store = with_rows(store, *given, capacity=capacity, distance=distance)
    arrays = {"embeddings": store.embeddings, "maps": store.maps.swapaxes(0, 1)}
    settings = {"capacity": capacity, "distance": distance}
    return ExpertMap(fitted(NAME, header, arrays, settings), capacity, distance)


def read(path: str) -> ExpertMap:
    """The policy with the maps that a fit wrote to the file."""
    state = read_fitted(path, NAME)
    return ExpertMap(state, state.setting("capacity"), state.setting("distance"))
