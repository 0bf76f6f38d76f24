"""MoE-Infinity: prefetch by the expert activation matrices of earlier sequences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import (
    Decision,
    Moment,
    Observation,
    Spec,
    Stage,
    Stages,
    routed_counts,
    stages_at,
    stages_of_queue,
)
from host_offload.policies.prefetch.fitted import Fitted, fit_of
from host_offload.traces.reader import Trace
from pallas_kernels.cpu.wanted import want_by_matrices

NAME = "moe-infinity"


class Running(NamedTuple):
    """A sequence that has not ended."""

    matrix: np.ndarray
    """int32[L, E]: its activation matrix so far, tokens routed to each expert."""
    cosines: np.ndarray | None
    """float32[n, L]: of its rows and each matrix of the collection; None: unknown."""


class Traced(NamedTuple):
    """State of MoEInfinity."""

    running: dict[int, Running]
    """By request."""
    collection: np.ndarray
    """float32[n, L, E]: matrices of sequences that ended; a layer's row sums to 1."""
    lengths: np.ndarray
    """float32[n, L]: lengths of their rows."""
    used: np.ndarray
    """int64[n]: how often each was the nearest."""
    top_k: int
    first: tuple[Stage, ...] = ()
    """What is wanted before the first router."""


@dataclasses.dataclass(frozen=True)
class MoEInfinity:
    """Activation-aware prefetch (Xue et al. 2024, arXiv:2401.14361), as fMoE describes it as a
    baseline in sections 4.2, 6.1 and 6.5, otherwise as in its public code: TorchMoE/MoE-Infinity,
    moe_infinity/memory/expert_tracer.py and expert_predictor.py, commit cca059cc.

    A sequence has an expert activation matrix. After each router the nearest matrix of the
    collection, by the mean over layers of the cosine, predicts the later layers of each sequence of
    the step. Experts are wanted in the order of share of the layer × (1 − (x − l)/(L + 1)), x being
    the layer and l the routed one, summed over sequences. Before the first router nothing is known
    about the step, so the first `first` layers take the most popular experts of the whole
    collection.

    The least frequently used expert is evicted. A sequence that has ended enters the collection. If
    that is full, it replaces the least used matrix, except those of `fitted`. Needs driver="host".
    docs/explanation/policies.md says what differs from the paper and its code.
    """

    fitted: Fitted | None = None
    capacity: int = 128
    """Most matrices."""
    limit: int = 256
    """Most experts wanted at a time."""
    first: int = 3
    """Layers that take popular experts, at most all; fMoE's prefetch distance."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED, Moment.TURN_END})
    needs: frozenset[str] = frozenset({"request", "ids"})
    writes: frozenset[str] = frozenset({"victim_weights", "stages"})
    victim_weights: tuple[int, int, int] = (0, 1, 0)
    """LFU."""

    def init(self, spec: Spec) -> Traced:
        """The state with the fitted collection. Raises ValueError for another model."""
        if self.capacity < 1 or self.limit < 1:
            raise ValueError(
                f"capacity and limit must be at least 1, not {self.capacity} and {self.limit}"
            )
        if self.first < 0:
            raise ValueError(f"first must be at least 0, not {self.first}")
        collection = np.zeros((0, spec.layers, spec.experts), np.float32)
        if self.fitted is not None:
            self.fitted.check(spec)
            collection = self.fitted.array("matrices", -1, spec.layers, spec.experts)
            if len(collection) > self.capacity:
                raise ValueError(
                    f"{len(collection)} matrices are given and capacity is {self.capacity}; fit "
                    "with a smaller one"
                )
        lengths, used = row_lengths(collection), np.zeros(len(collection), np.int64)
        return self._collect(Traced({}, collection, lengths, used, spec.top_k))

    def memory(self, spec: Spec) -> int:
        """Bytes of the collection when it is full."""
        return self.capacity * spec.layers * spec.experts * 4

    def decide(self, state: Traced, seen: Observation) -> tuple[Traced, Decision]:
        if seen.moment == Moment.TURN_END:
            return self._end_sequence(state, seen.turn), Decision()
        if seen.moment == Moment.EMBEDDED:
            return state, Decision(stages=state.first)
        if not len(seen.request):
            return state, Decision(stages=())
        running, used = {**state.running}, state.used.copy()
        requests = sorted({*seen.request.tolist()})
        sequences = [_copy_of(state, running.get(request)) for request in requests]
        running |= {r: Running(*one) for r, one in zip(requests, sequences, strict=True)}
        place = np.zeros(len(seen.request), np.int64)
        if len(requests) > 1:
            place = np.searchsorted(requests, seen.request)
        given = sequences, seen.ids[:, 0], place, used
        state = Traced(running, *state[1:3], used, *state[4:])
        queue = want_by_matrices(state.collection, state.lengths, seen.layer, *given, self.limit)
        if queue is not None:
            stages = stages_of_queue(queue, state.collection.shape[1:], NAME)
        else:
            stages = self._queue(_predict(state, seen.layer, *given), seen.layer)
        return state, Decision(stages=stages)

    def _queue(self, likely: np.ndarray, now: int) -> Stages:
        """The `limit` most urgent experts of the layers after `now`, float[L − now − 1, E], equal
        ones by layer and expert; 0 is not wanted."""
        later, experts = likely.shape
        wanted = (likely * _nearness(later, later + now + 2)).ravel()
        places = np.flatnonzero(wanted)
        if len(places) > self.limit:  # those that can be among the first, so that few are sorted
            cut = len(wanted) - self.limit
            places = np.flatnonzero(wanted >= np.partition(wanted, cut)[cut])
        first = places[np.argsort(-wanted[places], kind="stable")[: self.limit]]
        return stages_at(first // experts + now + 1, first % experts, NAME)

    def _collect(self, state: Traced, **changes: Any) -> Traced:
        """The state with a changed collection."""
        state = state._replace(**changes)
        popular = popular_experts(state.collection, self.first, state.top_k)
        running = {request: one._replace(cosines=None) for request, one in state.running.items()}
        return state._replace(running=running, first=self._queue(popular, -1))

    def _end_sequence(self, state: Traced, request: int) -> Traced:
        running = {**state.running}
        ended = running.pop(request, None)
        if ended is None:
            return state
        state, new = state._replace(running=running), shares(ended.matrix)[None]
        if len(state.collection) < self.capacity:
            return self._collect(
                state,
                collection=np.concatenate([state.collection, new]),
                lengths=np.concatenate([state.lengths, row_lengths(new)]),
                used=np.append(state.used, 1),
            )
        kept = 0 if self.fitted is None else len(self.fitted.arrays["matrices"])
        if kept == self.capacity:
            return state
        place = kept + int(np.argmin(state.used[kept:]))
        collection, used = state.collection.copy(), state.used.copy()
        lengths = state.lengths.copy()
        collection[place], lengths[place], used[place] = new[0], row_lengths(new)[0], 1
        return self._collect(state, collection=collection, lengths=lengths, used=used)


def fit(trace: Trace, *, capacity: int = 128) -> MoEInfinity:
    """MoEInfinity that begins with the sequences of a trace: all of them, or those that differ most
    (the paper clusters). Half of the capacity is left for new sequences.

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
    """At most `count` indices of matrices float32[n, L, E] that differ most: the first, then always
    the one least similar to all chosen ones."""
    if not len(matrices):
        return []
    chosen, likest = [0], similarity(matrices, matrices[0])
    while len(chosen) < min(count, len(matrices)):
        likest[chosen] = np.inf
        chosen.append(int(np.argmin(likest)))
        likest = np.maximum(likest, similarity(matrices, matrices[chosen[-1]]))
    return chosen


def popular_experts(collection: np.ndarray, layers: int, top_k: int) -> np.ndarray:
    """float64[L, E]: for the first `layers` layers, the summed shares of the top_k most used
    experts of the collection float32[n, L, E]; 0 for all others."""
    total = collection.sum(axis=0, dtype=np.float64)
    best = np.argsort(-total[:layers], axis=1, kind="stable")[:, :top_k]
    wanted = np.zeros_like(total)
    np.put_along_axis(wanted[:layers], best, np.take_along_axis(total[:layers], best, 1), 1)
    return wanted


def shares(matrix: np.ndarray) -> np.ndarray:
    """A matrix float32[L, E] scaled so that its rows sum to 1."""
    return (matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def row_lengths(matrices: np.ndarray) -> np.ndarray:
    """float32[…, L]: lengths of the rows of matrices [..., L, E]. Sums are float64, so that the
    order in which the native library sums is not seen."""
    squares = np.einsum("...e,...e->...", matrices, matrices, dtype=np.float64)
    return np.sqrt(squares).astype(np.float32)


@functools.lru_cache(maxsize=1024)
def _nearness(later: int, parts: int) -> np.ndarray:
    """float64[later, 1]: 1 − n / parts of the n-th layer to come."""
    return 1 - np.arange(1, later + 1)[:, None] / parts


def mean_of_layers(cosines: np.ndarray) -> np.ndarray:
    """float32[n]: the mean over layers of cosines [n, L]; np.mean takes several times as long."""
    sums = np.add.reduce(cosines, axis=1, dtype=np.float64)
    return (sums / cosines.shape[1]).astype(np.float32)


def similarity(
    collection: np.ndarray, matrix: np.ndarray, lengths: np.ndarray | None = None
) -> np.ndarray:
    """float[n]: the mean over layers of the cosine of each matrix of [n, L, E] and [L, E].

    - `lengths`: row_lengths of the collection, if they are known.
    """
    lengths = row_lengths(collection) if lengths is None else lengths
    return mean_of_layers(cosines_of(collection, matrix, lengths))


def cosines_of(collection: np.ndarray, matrix: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float32[n, L]: the cosine of each layer's rows of [n, L, E] and [L, E]."""
    products = np.einsum("nle,le->nl", collection, matrix, dtype=np.float64).astype(np.float32)
    return products / np.maximum(lengths * row_lengths(matrix), np.float32(1e-12))


def _copy_of(state: Traced, before: Running | None) -> tuple[np.ndarray, np.ndarray]:
    """A copy of a sequence's matrix, and its cosines."""
    if before is None:
        before = Running(np.zeros(state.collection.shape[1:], np.int32), None)
    matrix, cosines = before.matrix.copy(), before.cosines
    if cosines is None:
        return matrix, cosines_of(state.collection, shares(matrix), state.lengths)
    return matrix, cosines.copy()


def _predict(
    state: Traced,
    layer: int,
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    ids: np.ndarray,
    place: np.ndarray,
    used: np.ndarray,
) -> np.ndarray:
    """float64[L − layer − 1, E]: what want_by_matrices sorts, without the native library. It
    changes the same arrays."""
    collection, experts = state.collection, state.collection.shape[2]
    cells = (place[:, None] * experts + ids).ravel()
    tokens = np.bincount(cells, minlength=len(sequences) * experts).reshape(-1, experts)
    predicted = np.zeros((collection.shape[1] - layer - 1, experts))
    here = slice(layer, layer + 1)
    for (matrix, cosines), more in zip(sequences, tokens, strict=True):
        matrix[layer] += more
        if len(collection):
            row = shares(matrix[here])
            cosines[:, here] = cosines_of(collection[:, here], row, state.lengths[:, here])
            nearest = int(np.argmax(mean_of_layers(cosines)))
            used[nearest] += 1
            predicted += collection[nearest, layer + 1 :]
    return predicted
