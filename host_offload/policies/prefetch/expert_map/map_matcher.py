"""Searches expert maps for a step, in the thread of inference or in another process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Moment, Observation
from host_offload.policies.prefetch.expert_map.map_store import (
    NONE,
    FoundMaps,
    MapStore,
    Trajectory,
    with_rows,
)

log = logging.getLogger("moejax")

RESTARTS = 3
"""Times that a process of searches is started anew before searches end."""

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

    def see(self, seen: Observation | Published) -> tuple[MapMatcher, MapPrediction | None]:
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
        # dataclasses.replace takes five times as long.
        after = MapMatcher(store, trajectory, self.capacity, self.distance, self.learns)
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


class Published(NamedTuple):
    """The fields of an Observation that a matcher reads, as they go to another process."""

    moment: Moment
    step: int
    layer: int
    embedding: Any
    probs: Any


class AsynchronousMatcher:
    """A matcher in a process of its own (fMoE, section 4.3, "Asynchronous expert map matching"), so
    that its Python takes neither a thread of inference nor the lock of its interpreter.

    It sees moments in the order in which they are published. A search for a step that has already
    been followed by another one is skipped, since nothing can use it. The process ends with the
    matcher. Until it has started, searches are late. If it is killed, another one begins with the
    maps of the start, which a warning says; after RESTARTS of them steps run without searches.
    """

    def __init__(self, matcher: MapMatcher):
        self.nbytes, self.size, self._newest = matcher.nbytes, matcher.size, -1
        self._begun = matcher
        self._process = _start_process()
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="expert-map")
        """Waits for the other process."""
        self._pending: list[Future[MapPrediction | None]] = []
        self.left_out = 0
        """Searches that were skipped."""
        self.ends = 0
        """Processes that ended by themselves."""
        self._pending.append(self._thread.submit(self._send, matcher))

    def publish(self, seen: Observation) -> None:
        """Gives a moment to the other process and returns at once. Arrays are kept until then."""
        if seen.moment in IN_STEP:
            self._newest = max(self._newest, seen.step)
        kept = Published(*(getattr(seen, name) for name in Published._fields))
        self._pending.append(self._thread.submit(self._see, kept))

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

    def _see(self, seen: Published) -> MapPrediction | None:
        late = seen.moment in IN_STEP and seen.step < self._newest
        if late or self.ends > RESTARTS:
            self.left_out += seen.moment in IN_STEP
            return None
        self._send(seen)
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):  # it ended, maybe within an answer
            self._begin_again()
            self.left_out += seen.moment in IN_STEP
            return None
        if isinstance(answer, Exception):
            raise answer
        prediction, self.nbytes, self.size = answer
        return prediction

    def _begin_again(self) -> None:
        """Starts another process for one that ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._finalizer()
        self.ends += 1
        ended = f"the process of map searches ended with status {self._process.returncode}"
        if self.ends > RESTARTS:
            log.warning("%s, for the %dth time: no more experts are prefetched", ended, self.ends)
            return
        log.warning("%s; another one begins with the maps of the start", ended)
        self.nbytes, self.size = self._begun.nbytes, self._begun.size
        try:
            self._process = _start_process()
        except OSError as error:
            self.ends = RESTARTS + 1
            log.warning("no process for map searches (%s): no more experts are prefetched", error)
            return
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._send(self._begun)

    def _send(self, value: MapMatcher | Published) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its answer says so
            pickle.dump(value, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()


def answer_searches() -> None:
    """Runs the process of an AsynchronousMatcher: reads the matcher and what it sees, and answers
    each with (prediction, bytes, maps) or an error."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    matcher: MapMatcher = pickle.load(source)
    while True:
        try:
            seen: Published = pickle.load(source)
        except EOFError:
            return
        try:
            matcher, prediction = matcher.see(seen)
            answer: Any = prediction, matcher.nbytes, matcher.size
        except Exception as error:
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _start_process() -> subprocess.Popen[bytes]:
    call = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    call += f"from {__name__} import answer_searches; answer_searches()"
    # In a group of its own: Ctrl-C is for this process, with which the other one ends.
    return subprocess.Popen(
        [sys.executable, "-c", call, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    # At the end of its input it ends too, but a forked child of this process holds that open. In
    # such a child the process counts as ended, and nothing is killed.
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:
        pass
