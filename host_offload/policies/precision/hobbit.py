"""HOBBIT: a miss that weighs little comes in fewer bits."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Transition
from host_offload.memory.budget import cells_of_layers
from host_offload.policies.precision.maps import HI, LO


@dataclasses.dataclass(frozen=True)
class Hobbit:
    """Misses in the high version for experts that matter, else in the low one (HOBBIT, Tang et al.,
    arXiv:2411.01433, "token-level dynamic expert loading"). THIS CHANGES OUTPUTS.

    An expert matters if, in some row, those of more weight have at most `threshold` of the row's
    weight together. Resident experts are used as they are. HOBBIT's prefetch and its cache policy
    are not here, and it skips the least experts, which this does not. Needs driver="host".
    """

    threshold: float = 0.6
    """T1 of the paper."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"ids", "weights"})
    writes: frozenset[str] = frozenset({"fill_version"})

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a share from 0 to 1, not {self.threshold}")

    def init(self, spec: Spec) -> np.ndarray:
        """int8[L, E]: the version that a miss fills."""
        return np.full((spec.layers, spec.experts), HI, np.int8)

    def decide(self, state: np.ndarray, seen: Observation) -> tuple[np.ndarray, Decision]:
        (heavy,) = find_heavy(seen.ids, seen.weights, state.shape[1], self.threshold)
        state = state.copy()
        state[seen.layer] = np.where(heavy, HI, LO)
        return state, Decision(fill_version=state)


class Waiting(NamedTuple):
    """State of Promotions."""

    experts: np.ndarray
    """bool[L, E]: those whose miss brought the low version, which they still have."""
    cells: np.ndarray
    """int64[L]: high cells."""


@dataclasses.dataclass(frozen=True)
class Promotions:
    """Brings the high version of experts whose miss brought the low one, while the link has time.

    Misses come first: a step's misses and the promotions that follow them are at most `most`
    experts, the latest used first and one of a layer. A promotion takes a free high cell, or,
    with eviction lru, that of an expert that was used before; otherwise the expert waits while it
    is resident.
    """

    most: int

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"missed", "version", "last_used"})
    writes: frozenset[str] = frozenset({"transitions"})

    def init(self, spec: Spec) -> Waiting:
        high = 0 if spec.capacity is None else spec.capacity[HI]
        cells = cells_of_layers(high, spec.has_all_versions.tolist(), spec.experts)
        return Waiting(np.zeros((spec.layers, spec.experts), bool), np.array(cells))

    def decide(self, state: Waiting, seen: Observation) -> tuple[Waiting, Decision]:
        waiting = (state.experts | seen.missed) & (seen.version == LO)
        high = seen.version == HI
        victims = np.where(high, seen.last_used, np.iinfo(np.int32).max).min(axis=1)
        free = high.sum(axis=1) < state.cells
        used = np.where(waiting, seen.last_used, -1)
        latest = used.max(axis=1)
        layers = np.flatnonzero((latest > victims) | (free & (latest >= 0)))
        layers = layers[np.argsort(-latest[layers], kind="stable")]
        due = layers[: max(self.most - np.count_nonzero(seen.missed), 0)]
        transitions = zip(due.tolist(), used[due].argmax(axis=1).tolist(), strict=True)
        decision = Decision(transitions=tuple(Transition(*place, HI) for place in transitions))
        return state._replace(experts=waiting), decision


def find_heavy(ids: np.ndarray, weights: np.ndarray, experts: int, threshold: float) -> np.ndarray:
    """Returns bool[M, E], the experts of M layers that matter to some row (see Hobbit).

    - `ids`, `weights`: [N, M, k].
    """
    weights = np.asarray(weights, np.float32)
    order = np.argsort(-weights, axis=2, kind="stable")
    ids = np.take_along_axis(ids, order, axis=2)
    shares = np.take_along_axis(weights, order, axis=2)
    shares /= np.maximum(shares.sum(axis=2, keepdims=True), 1e-9)
    row, layer, place = np.nonzero(np.cumsum(shares, axis=2) - shares <= threshold + 1e-6)
    found = np.zeros((ids.shape[1], experts), bool)
    found[layer, ids[row, layer, place]] = True
    return found
