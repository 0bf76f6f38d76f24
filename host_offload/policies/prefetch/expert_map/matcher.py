"""Searches beside inference (fMoE, section 4.3, "Asynchronous expert map matching"): what is seen
is published, and found where it is ready."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from host_offload.control.interface import Moment, Observation
from host_offload.policies.prefetch.expert_map.trackers import MapPrediction, Tracker

IN_STEP = frozenset({Moment.EMBEDDED, Moment.ROUTED})
"""When something is predicted."""


class Matcher:
    """A tracker on a thread of its own. It sees moments in the order in which they are published;
    a search of a step that another one has followed is left out, since nothing can use it. The
    thread ends with the matcher."""

    def __init__(self, tracker: Tracker):
        self._tracker, self._newest = tracker, -1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="expert-map")
        self._pending: list[tuple[int, Future[MapPrediction | None]]] = []
        self.searches = 0
        """Moments of steps that were published so far."""
        self.left_out = 0
        """Searches that were left out."""

    def publish(self, observation: Observation) -> None:
        """Returns at once; arrays of the observation are kept, not copied."""
        self._newest = max(self._newest, observation.step if observation.moment in IN_STEP else -1)
        found = self._thread.submit(self._see, observation)
        self.searches += observation.moment in IN_STEP
        self._pending.append((observation.step, found))

    def found(self) -> list[tuple[int, MapPrediction]]:
        """(step, what was predicted in it) of the searches that ended since the last call, in their
        order; waits for none. Raises what a search raised."""
        ready: list[tuple[int, MapPrediction]] = []
        while self._pending and self._pending[0][1].done():
            step, future = self._pending.pop(0)
            if (prediction := future.result()) is not None:
                ready.append((step, prediction))
        return ready

    def wait(self) -> None:
        """Until all is seen that was published: for tests and the end of a measurement."""
        for _, future in self._pending:
            future.exception()

    @property
    def nbytes(self) -> int:
        return self._tracker.nbytes

    def _see(self, observation: Observation) -> MapPrediction | None:
        if observation.moment in IN_STEP and observation.step < self._newest:
            self.left_out += 1
            return None
        self._tracker, prediction = self._tracker.seen(observation)
        return prediction
