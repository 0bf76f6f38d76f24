"""MoE-Infinity: prefetch by the expert activation matrices of earlier sequences."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage, routed_counts
from host_offload.policies.prefetch.fitted import Fitted, fit_of
from host_offload.traces.reader import Trace

NAME = "moe-infinity"


class Traced(NamedTuple):
    """State of MoEInfinity."""

    running: dict[int, np.ndarray]
    """Request → its activation matrix so far, int32[L, E]: tokens routed to each expert."""
    collection: np.ndarray
    """float32[n, L, E]: matrices of sequences that ended; a layer's row sums to 1."""
    used: np.ndarray
    """int64[n]: how often each was the nearest."""
    top_k: int


@dataclasses.dataclass(frozen=True)
class MoEInfinity:
    """Activation-aware prefetch (Xue et al. 2024, arXiv:2401.14361), as a baseline in fMoE,
    sections 4.2, 6.1 and 6.5; where that is silent, as its public code does it: TorchMoE/
    MoE-Infinity, moe_infinity/memory/expert_tracer.py and expert_predictor.py, commit cca059cc.

    A sequence has an expert activation matrix. After each router the nearest of the collection, by
    the mean over layers of the cosine, predicts the layers to come of each sequence of the step:
    wanted first is who has the largest share of its layer × (1 − (x − l)/(L + 1)), x the layer, l
    the one routed, summed over sequences. Before the first router nothing of the step is known, so
    the first `first` layers take the experts that were most popular in the whole collection.
    Evicted is the least frequently used. A sequence that ended goes into the collection, in place
    of the least used one when that is full, but never of those of `fitted`, which are collected
    beforehand. Needs driver="host". docs/explanation/policies.md says what differs from the paper
    and its code.
    """

    fitted: Fitted | None = None
    capacity: int = 128
    """Most matrices."""
    limit: int = 256
    """Most experts that are wanted at a time."""
    first: int = 3
    """Layers that take popular experts, at most all; fMoE's prefetch distance."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED, Moment.TURN_END})
    needs: frozenset[str] = frozenset({"request", "ids"})
    writes: frozenset[str] = frozenset({"victim_weights", "stages"})
    victim_weights: tuple[int, int, int] = (0, 1, 0)
    """LFU."""

    def init(self, spec: Spec) -> Traced:
        """No sequence; the collection that is given. Raises ValueError for another model."""
        if self.capacity < 1 or self.limit < 1:
            raise ValueError(
                f"capacity and limit must be at least 1, not {self.capacity} and {self.limit}"
            )
        if self.first < 0:
            raise ValueError(f"first must be at least 0, not {self.first}")
        collection = np.zeros((0, spec.layers, spec.experts), np.float32)
        if self.fitted is not None:
            self.fitted.check(spec)
            collection = self.fitted.arrays["matrices"]
            if len(collection) > self.capacity:
                raise ValueError(
                    f"{len(collection)} matrices are given and capacity is {self.capacity}; fit "
                    "with a smaller one"
                )
        return Traced({}, collection, np.zeros(len(collection), np.int64), spec.top_k)

    def memory(self, spec: Spec) -> int:
        """Bytes of the collection when it is full."""
        return self.capacity * spec.layers * spec.experts * 4

    def decide(self, state: Traced, seen: Observation) -> tuple[Traced, Decision]:
        if seen.moment == Moment.TURN_END:
            return self._end_sequence(state, seen.turn), Decision()
        if seen.moment == Moment.EMBEDDED:
            popular = popular_experts(state.collection, self.first, state.top_k)
            return state, Decision(stages=self._queue(popular, -1))
        layers, experts = state.collection.shape[1:]
        running, used = {**state.running}, state.used.copy()
        predicted = np.zeros((layers, experts))
        for request in np.unique(seen.request).tolist():
            tokens = routed_counts(seen.ids[seen.request == request], experts)[0]
            matrix = running.get(request, np.zeros((layers, experts), np.int32)).copy()
            matrix[seen.layer] += tokens.astype(np.int32)
            running[request] = matrix
            if len(state.collection):
                nearest = int(np.argmax(similarity(state.collection, shares(matrix))))
                used[nearest] += 1
                predicted += state.collection[nearest]
        state = state._replace(running=running, used=used)
        return state, Decision(stages=self._queue(predicted, seen.layer))

    def _queue(self, likely: np.ndarray, now: int) -> tuple[Stage, ...]:
        """The `limit` most urgent of float[L, E] behind layer `now`, equal ones by layer and
        expert; 0 is not wanted."""
        ahead = np.arange(len(likely))[:, None] - now
        wanted = np.where(ahead > 0, likely * (1 - ahead / (len(likely) + 1)), 0)
        layer, expert = np.nonzero(wanted)
        first = np.argsort(-wanted[layer, expert], kind="stable")[: self.limit]
        places = zip(layer[first].tolist(), expert[first].tolist(), strict=True)
        return tuple(Stage(*place, cause=NAME) for place in places)

    def _end_sequence(self, state: Traced, request: int) -> Traced:
        running = {**state.running}
        matrix = running.pop(request, None)
        if matrix is None:
            return state
        state, new = state._replace(running=running), shares(matrix)[None]
        if len(state.collection) < self.capacity:
            collection = np.concatenate([state.collection, new])
            return state._replace(collection=collection, used=np.append(state.used, 1))
        kept = 0 if self.fitted is None else len(self.fitted.arrays["matrices"])
        if kept == self.capacity:
            return state
        place = kept + int(np.argmin(state.used[kept:]))
        collection, used = state.collection.copy(), state.used.copy()
        collection[place], used[place] = new[0], 1
        return state._replace(collection=collection, used=used)


def fit(trace: Trace, *, capacity: int = 128) -> MoEInfinity:
    """MoEInfinity that begins with the sequences of a trace: with all of them, or with those that
    are farthest from each other (the first, then always the one least like any chosen; the paper
    clusters). Half of the capacity is left for those to come.

    Raises TraceError for a trace that does not know its requests.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    header = trace.header
    requests, ids = trace.array("token.request"), trace.array("token.ids")
    known, first = np.unique(requests, return_index=True)
    matrices = [
        shares(routed_counts(ids[requests == request], header.experts))
        for request in known[np.argsort(first)]
    ]
    every = np.array(matrices, np.float32).reshape(-1, header.layers, header.experts)
    arrays = {"matrices": every[choose_diverse(every, -(-capacity // 2))]}
    found = fit_of(NAME, header, arrays, {"capacity": capacity})
    return MoEInfinity(fitted=found, capacity=capacity)


def choose_diverse(matrices: np.ndarray, count: int) -> list[int]:
    """Which of float32[n, L, E] to keep of at most `count`: the first, then always the one least
    like any chosen."""
    if not len(matrices):
        return []
    chosen, likest = [0], similarity(matrices, matrices[0])
    while len(chosen) < min(count, len(matrices)):
        likest[chosen] = np.inf
        chosen.append(int(np.argmin(likest)))
        likest = np.maximum(likest, similarity(matrices, matrices[chosen[-1]]))
    return chosen


def popular_experts(collection: np.ndarray, layers: int, top_k: int) -> np.ndarray:
    """float64[L, E]: of the first `layers` layers the summed shares of the top_k experts that the
    collection float32[n, L, E] used most; 0 of all others."""
    total = collection.sum(axis=0, dtype=np.float64)
    best = np.argsort(-total[:layers], axis=1, kind="stable")[:, :top_k]
    wanted = np.zeros_like(total)
    np.put_along_axis(wanted[:layers], best, np.take_along_axis(total[:layers], best, 1), 1)
    return wanted


def shares(matrix: np.ndarray) -> np.ndarray:
    """float32[L, E] whose rows sum to 1."""
    return (matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def similarity(collection: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """float[n]: mean over layers of the cosine of each of [n, L, E] and [L, E]."""
    lengths = np.linalg.norm(collection, axis=2) * np.linalg.norm(matrix, axis=1)
    products = np.einsum("nle,le->nl", collection, matrix)
    return np.mean(products / np.maximum(lengths, 1e-12), axis=1)
