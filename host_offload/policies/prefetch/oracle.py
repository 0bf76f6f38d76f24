"""Controls that know the run: a prefetch between steps, and one between layers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, NoReturn

import numpy as np

from host_offload.control.interface import (
    Decision,
    Moment,
    Observation,
    Spec,
    Stage,
    State,
    stages_at,
)
from host_offload.policies.eviction.belady import next_uses
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.step_sets import check_future, needed_experts
from pallas_kernels.plan.victim import MAX_PRIOR


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
            _refuse_run(seen.step)
        first = seen.step + seen.age + 1
        due = future[first : first + self.horizon]
        missing = due[:1].any(axis=0) & (seen.state == State.ABSENT)
        wanted: dict[Stage, None] = {}
        for needed in due:
            for place in np.argwhere(needed & ~missing).tolist():
                wanted.setdefault(Stage(*place, cause="oracle"))
        return None, Decision(stages=tuple(wanted))


@dataclasses.dataclass(frozen=True)
class Clairvoyant:
    """What a host driver could do that knows the run: before the first layer and after each router
    it wants the absent experts that coming layers need, up to this layer in the next step, the
    nearest layer first. Misses and transfers evict the expert that is needed last (MIN).

    Between two layers the experts of this step cannot leave, so of earlier layers it wants no more
    than others can leave for. Needs driver="host".
    """

    needed: np.ndarray = dataclasses.field(repr=False, compare=False)
    """bool[T, L, E]: the experts that each step needs."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED})
    needs: frozenset[str] = frozenset({"ids", "state", "cells"})
    writes: frozenset[str] = frozenset({"stages", "victim_weights", "prior"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)

    def init(self, spec: Spec) -> Foresight:
        check_future(self.needed, spec)
        return Foresight(next_uses(self.needed), spec.stage_entries)

    def decide(self, state: Foresight, seen: Observation) -> tuple[Foresight, Decision]:
        step, layer, routed = seen.step, max(seen.layer, 0), seen.moment == Moment.ROUTED
        if step >= len(self.needed):
            _refuse_run(step)
        now = self.needed[step]
        if routed and not np.array_equal(np.unique(seen.ids), np.flatnonzero(now[layer])):
            _refuse_run(step)
        # Of layers that the step has left, the next step's experts are the next ones.
        left = (np.arange(len(now)) < layer)[:, None]
        due = np.where(left, state.due[step + 1], state.due[step])
        here, used, soon = seen.state != ABSENT, now & left, due <= step + left
        others = np.sum(here & ~used & ~soon, axis=1) + seen.cells - np.sum(here, axis=1)
        wanted = soon & ~here
        wanted &= ~left | (np.cumsum(wanted, axis=1) <= others[:, None])
        coming = np.arange(layer + routed, layer + len(now)) % len(now)
        place, expert = np.nonzero(wanted[coming])
        prior = np.where(used, MAX_PRIOR, np.maximum(MAX_PRIOR - (due - step), -MAX_PRIOR))
        # What the list has no room for is decided again; it would else come behind its layer.
        stages = stages_at(coming[place], expert, "clairvoyant")[: state.entries]
        return state, Decision(prior=prior, stages=stages)


class Foresight(NamedTuple):
    """State of Clairvoyant."""

    due: np.ndarray
    """int32[T + 1, L, E]: the first step at or after each that needs the expert."""
    entries: int
    """Most transfers of a list."""


ABSENT = int(State.ABSENT)


def _refuse_run(step: int) -> NoReturn:
    raise ValueError(
        f"step {step} did not route as the future said: this is another run; an oracle is for the "
        "simulator"
    )


def clairvoyant_of(trace: Trace) -> Clairvoyant:
    """Clairvoyant of a run, from its trace. Raises ValueError for a trace that lacks steps."""
    return Clairvoyant(needed_experts(trace))


def oracle_of(trace: Trace, *, horizon: int = 8) -> Oracle:
    """The oracle of a run, from its trace. Raises ValueError for a trace that lacks steps."""
    return Oracle(needed_experts(trace), horizon)


def read(path: str) -> Oracle:
    """The oracle of the run whose trace is in the directory."""
    return oracle_of(read_trace(path))
