"""MoE-Infinity: prefetch by the expert activation matrices of earlier sequences."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage, routed_counts
from host_offload.policies.prefetch.fitted import Fitted, fitted, read_fitted
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError
from pallas_kernels.plan.victim import log2_fixed

NAME = "moe-infinity"


class Traced(NamedTuple):
    """State of MoEInfinity."""

    running: dict[int, np.ndarray]
    """Request → its activation matrix so far, int32[L, E]: tokens routed to each expert."""
    collection: np.ndarray
    """float32[n, L, E]: matrices of sequences that ended; a layer's row sums to 1."""
    used: np.ndarray
    """int64[n]: how often each was the nearest."""


@dataclasses.dataclass(frozen=True)
class MoEInfinity:
    """Activation-aware prefetch and eviction (Xue et al. 2024, arXiv:2401.14361; details from its
    public code, moe_infinity/memory; as a baseline in fMoE, sections 6.1 and 6.5).

    A sequence has an expert activation matrix; one that ended goes into a collection, in place of
    the least used when it is full, but never of those of `fitted`. The nearest of the collection,
    by the mean over layers of the cosine, predicts a sequence's experts. Wanted first is who has
    the largest share of its layer × (1 − l/(L + 1)), summed over the sequences of the step.
    Evicted is who the running sequences routed fewest tokens to. docs/policies.md says what differs
    from the paper and its code.
    """

    fitted: Fitted | None = None
    capacity: int = 128
    """Most matrices."""
    limit: int = 256
    """Most experts that are wanted at a time."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    needs: frozenset[str] = frozenset({"request", "ids"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)

    def init(self, spec: Spec) -> Traced:
        """No sequence; the collection that is given. Raises ValueError for another model."""
        if self.capacity < 1 or self.limit < 1:
            raise ValueError(
                f"capacity and limit must be at least 1, not {self.capacity} and {self.limit}"
            )
        collection = np.zeros((0, spec.layers, spec.experts), np.float32)
        if self.fitted is not None:
            self.fitted.check(spec)
            collection = self.fitted.arrays["matrices"]
            if len(collection) > self.capacity:
                raise ValueError(
                    f"{len(collection)} matrices are given and capacity is {self.capacity}; fit "
                    "with a smaller one"
                )
        return Traced({}, collection, np.zeros(len(collection), np.int64))

    def decide(self, state: Traced, observation: Observation) -> tuple[Traced, Decision]:
        seen: Any = observation
        if observation.moment == Moment.TURN_END:
            return self._ended(state, observation.turn), Decision()
        shape = state.collection.shape[1:]
        running = {**state.running}
        predicted, used = np.zeros(shape), state.used.copy()
        for request in np.unique(seen.request).tolist():
            tokens = routed_counts(seen.ids[seen.request == request], shape[1])
            running[request] = matrix = running.get(request, 0) + tokens.astype(np.int32)
            if len(state.collection):
                nearest = int(np.argmax(_similarity(state.collection, _shares(matrix))))
                used[nearest] += 1
                predicted += state.collection[nearest]
        state = Traced(running, state.collection, used)
        predicted *= 1 - np.arange(shape[0])[:, None] / (shape[0] + 1)
        layer, expert = np.nonzero(predicted)
        first = np.argsort(-predicted[layer, expert], kind="stable")[: self.limit]
        places = zip(layer[first].tolist(), expert[first].tolist(), strict=True)
        tokens = sum(running.values(), np.zeros(shape, np.int32))
        return state, Decision(
            prior=log2_fixed(1 + tokens).astype(np.int32),
            stages=tuple(Stage(*place, cause=NAME) for place in places),
        )

    def _ended(self, state: Traced, request: int) -> Traced:
        running = {**state.running}
        matrix = running.pop(request, None)
        if matrix is None:
            return state
        new = _shares(matrix)[None]
        if len(state.collection) < self.capacity:
            collection = np.concatenate([state.collection, new])
            return Traced(running, collection, np.append(state.used, 1))
        kept = 0 if self.fitted is None else len(self.fitted.arrays["matrices"])
        if kept == self.capacity:
            return state._replace(running=running)
        place = kept + int(np.argmin(state.used[kept:]))
        collection, used = state.collection.copy(), state.used.copy()
        collection[place], used[place] = new[0], 1
        return Traced(running, collection, used)


def fit(trace: Trace, *, capacity: int = 128) -> MoEInfinity:
    """MoEInfinity that begins with the sequences of a trace: with all of them, or with those that
    are farthest from each other (the first, then always the one least like any chosen; the paper
    clusters). Half of the capacity is left for those to come.

    Raises TraceError for a trace that does not know its requests.
    """
    header = trace.header
    if "token.request" in header.absent:
        raise TraceError(
            f"{trace.directory} does not say which request a token belongs to, which {NAME} learns "
            "from; record one with --trace DIR"
        )
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    shape = header.layers, header.experts
    running: dict[int, np.ndarray] = {}
    for step in trace.step_traces():
        for request in np.unique(step.request).tolist():
            tokens = routed_counts(step.ids[step.request == request], shape[1])
            running[request] = running.get(request, 0) + tokens
    matrices = np.array([_shares(matrix) for matrix in running.values()], np.float32)
    chosen = [0] if running else []
    if running:
        likest = _similarity(matrices, matrices[0])
        while len(chosen) < min(-(-capacity // 2), len(matrices)):
            likest[chosen] = np.inf
            chosen.append(int(np.argmin(likest)))
            likest = np.maximum(likest, _similarity(matrices, matrices[chosen[-1]]))
    arrays = {"matrices": matrices.reshape(-1, *shape)[chosen]}
    return MoEInfinity(
        fitted=fitted(NAME, header, arrays, {"capacity": capacity}), capacity=capacity
    )


def read(path: str) -> MoEInfinity:
    """The policy with the matrices that a fit wrote to the file."""
    state = read_fitted(path, NAME)
    return MoEInfinity(fitted=state, capacity=state.setting("capacity"))


def _shares(matrix: np.ndarray) -> np.ndarray:
    """float32[L, E] whose rows sum to 1."""
    return (matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def _similarity(collection: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """float[n]: mean over layers of the cosine of each of [n, L, E] and [L, E]."""
    lengths = np.linalg.norm(collection, axis=2) * np.linalg.norm(matrix, axis=1)
    products = np.einsum("nle,le->nl", collection, matrix)
    return np.mean(products / np.maximum(lengths, 1e-12), axis=1)
