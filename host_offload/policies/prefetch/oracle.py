"""Oracle prefetch, a control."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage, State
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.step_sets import check_future, needed_experts


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Wants the experts that the next steps will need, the soonest first: the best that a prefetch
    with this lag and these lists could do.

    The future is a run's trace (see `oracle_of`). So it is for the simulator, or for an engine that
    repeats the run; another run is refused at its first different step. A decision enters the list
    of one step and takes effect in the next. An expert that the step itself needs is wanted if it
    is resident, so that it stays; otherwise it comes as a miss.
    """

    needed: np.ndarray = dataclasses.field(repr=False, compare=False)
    """bool[T, L, E]: the experts that each step needs."""
    horizon: int = 8
    """How many steps it looks ahead."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts", "state"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> None:
        check_future(self.needed, spec)
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, not {self.horizon}")

    def decide(self, state: None, seen: Observation) -> tuple[None, Decision]:
        future = self.needed
        if seen.step >= len(future):
            raise ValueError(
                f"the future ends before step {seen.step}; give all of the run's trace"
            )
        if not np.array_equal(future[seen.step], seen.counts > 0):
            raise ValueError(
                f"step {seen.step} did not route as the future said: this is another run; an "
                "oracle is for the simulator"
            )
        first = seen.step + seen.age + 1
        due = future[first : first + self.horizon]
        missing = due[:1].any(axis=0) & (seen.state == State.ABSENT)
        wanted: dict[Stage, None] = {}
        for needed in due:
            for place in np.argwhere(needed & ~missing).tolist():
                wanted.setdefault(Stage(*place, cause="oracle"))
        return None, Decision(stages=tuple(wanted))


def oracle_of(trace: Trace, *, horizon: int = 8) -> Oracle:
    """The oracle of a run, from its trace. Raises ValueError for a trace that lacks steps."""
    return Oracle(needed_experts(trace), horizon)


def read(path: str) -> Oracle:
    """The oracle of the run whose trace is in the directory."""
    return oracle_of(read_trace(path))
