"""Searches expert maps for a step, in the thread of inference or in another one."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Moment, Observation
from host_offload.policies.prefetch.expert_map.map_store import (
    NONE,
    FoundMaps,
    MapStore,
    Trajectory,
    with_rows,
)

IN_STEP = frozenset({Moment.EMBEDDED, Moment.ROUTED})
"""The moments of predictions."""


class MapPrediction(NamedTuple):
    """A prediction for some later layers."""

    step: int
    layers: range
    likely: np.ndarray
    """float32[M, N, E]: probabilities, of M layers and N rows."""
    scores: np.ndarray
    """float32[N]: similarity of each row and the map that predicts for it."""


@dataclasses.dataclass(frozen=True)
class MapMatcher:
    """Searches and learns, as an immutable value: the semantic search predicts the first `distance`
    layers, the trajectory search the layer `distance` after each router."""

    store: MapStore
    trajectory: Trajectory
    """The rows of the step in progress."""
    capacity: int
    distance: int
    learns: bool

    def see(self, seen: Observation) -> tuple[MapMatcher, MapPrediction | None]:
        """The matcher after a moment, and its prediction. It must see EMBEDDED and ROUTED, and
        learns at STEP_END; other moments may be skipped."""
        store = self.store
        if seen.moment == Moment.STEP_END:
            if not self.learns:
                return self, None
            sizes = {"capacity": self.capacity, "distance": self.distance}
            store, _ = with_rows(store, seen.embedding, seen.probs, **sizes)
            return dataclasses.replace(self, store=store), None
        if seen.moment == Moment.EMBEDDED:
            after = dataclasses.replace(self, trajectory=store.trajectory(len(seen.embedding)))
            found = store.nearest_embedding(seen.embedding)
            return after, self._predict(seen.step, range(self.distance), found)
        target = seen.layer + self.distance
        if target >= len(store.maps):  # nothing is left to predict in this step
            return self, None
        trajectory, found = store.nearest_map(self.trajectory, seen.layer, seen.probs[:, 0])
        after = dataclasses.replace(self, trajectory=trajectory)
        return after, self._predict(seen.step, range(target, target + 1), found)

    def _predict(self, step: int, layers: range, found: FoundMaps) -> MapPrediction | None:
        if not (len(found.place) and found.score[0] > NONE):
            return None
        likely = self.store.maps[layers.start : layers.stop, found.place]
        return MapPrediction(step, layers, likely, found.score)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.store)

    @property
    def size(self) -> int:
        return self.store.size


class AsynchronousMatcher:
    """A matcher on its own thread (fMoE, section 4.3, "Asynchronous expert map matching").

    It sees moments in the order in which they are published. A search for a step that has already
    been followed by another one is skipped, since nothing can use it. The thread ends with the
    matcher.
    """

    def __init__(self, matcher: MapMatcher):
        self._matcher, self._newest = matcher, -1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="expert-map")
        self._pending: list[Future[MapPrediction | None]] = []
        self.left_out = 0
        """Searches that were skipped."""

    def publish(self, seen: Observation) -> None:
        """Gives a moment to the thread and returns at once. Arrays are kept, not copied."""
        if seen.moment in IN_STEP:
            self._newest = max(self._newest, seen.step)
        self._pending.append(self._thread.submit(self._see, seen))

    def take_found(self) -> list[MapPrediction]:
        """The predictions of searches that ended since the last call, in order, without waiting.
        Raises what a search raised."""
        ready: list[MapPrediction] = []
        while self._pending and self._pending[0].done():
            if (prediction := self._pending.pop(0).result()) is not None:
                ready.append(prediction)
        return ready

    def wait(self) -> None:
        """Waits until all published moments are seen: for tests and the end of a measurement."""
        for future in self._pending:
            future.exception()

    @property
    def nbytes(self) -> int:
        return self._matcher.nbytes

    @property
    def size(self) -> int:
        return self._matcher.size

    def _see(self, seen: Observation) -> MapPrediction | None:
        if seen.moment in IN_STEP and seen.step < self._newest:
            self.left_out += 1
            return None
        self._matcher, prediction = self._matcher.see(seen)
        return prediction
