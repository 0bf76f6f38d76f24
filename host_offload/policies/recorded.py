"""Repeats the decisions of a recorded run.

Decisions that depend on times, such as those of searches beside inference, cannot be computed
again. With two processors of different bits, outputs also depend on which processor computed what.
A trace has the decisions, and this policy repeats them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Policy, Spec, Stage
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError


@dataclasses.dataclass(frozen=True)
class RecordedPolicy:
    """Repeats the decisions of a policy of a recorded run, at the same moments of the same steps.
    With the same requests in the same order, and the same budgets, residents are then the same at
    every layer, and the same processor computes each expert."""

    policy_name: str
    """Class of the policy that decided."""
    trace: str
    decisions: tuple[tuple[int, Moment, Decision], ...] = dataclasses.field(
        repr=False, compare=False
    )
    """(step, moment, decision), in order."""
    victim_weights: tuple[int, int, int] | None = None
    pool: bool = False

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset(moment for _, moment, _ in self.decisions)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"counts"} if Moment.EXPERTS_BEGIN in self.moments else ())

    @property
    def writes(self) -> frozenset[str]:
        written = {
            name
            for _, _, decision in self.decisions
            for name, value in vars(decision).items()
            if value is not None
        }
        return frozenset(written | ({"victim_weights"} if self.victim_weights else set()))

    def init(self, spec: Spec) -> int:
        """The number of decisions taken so far: 0."""
        return 0

    def decide(self, state: int, seen: Observation) -> tuple[int, Decision]:
        """Raises TraceError for a step or moment that the trace has no decision of."""
        here = seen.step, seen.moment
        if state < len(self.decisions) and self.decisions[state][:2] == here:
            return state + 1, self.decisions[state][2]
        if seen.moment == Moment.LAYER_BEGIN:  # moments at which a placement decides only sometimes
            return state, Decision()
        raise TraceError(
            f"{self.trace} has no decision of {self.policy_name} at {here[1].name} of step "
            f"{here[0]}, layer {seen.layer}: this run has other requests than the recorded "
            "one"
        )


def repeat_run(trace: Trace, policy: type | Policy) -> RecordedPolicy:
    """The policy that repeats what `policy`, or the policy of that class, decided in the run of a
    trace.

    It can repeat policies that decide at each of their moments while steps are made, about
    transfers, priors and placement. Raises TraceError for a trace without these decisions, or with
    others.
    """
    name = (policy if isinstance(policy, type) else type(policy)).__name__
    pool = getattr(policy, "pool", False)
    if pool and hasattr(policy, "pools"):
        raise TraceError(f"{name} pools cells in some steps, which a repeated run cannot")
    found = tuple(
        (line["step"], Moment[line["moment"]], _decision(name, line["decision"]))
        for line in trace.policy_decisions()
        if line["policy"] == name
    )
    if not found:
        raise TraceError(f"{trace.directory} has no decisions of {name}")
    weights = getattr(policy, "victim_weights", None)
    return RecordedPolicy(name, str(trace.directory), found, weights, pool)


_REPEATED: dict[str, Callable[[Any], Any]] = {
    "prior": lambda value: np.array(value, np.int32),
    "execute": lambda value: np.array(value, np.int8),
    "load_order": lambda value: np.array(value, np.int16),
    "stages": lambda value: tuple(Stage(*entry) for entry in value),
}
"""Field of a Decision → function from the value in a trace to its value."""


def _decision(name: str, written: dict[str, Any]) -> Decision:
    if others := sorted(written.keys() - _REPEATED.keys()):
        raise TraceError(
            f"{name} decided {others[0]}, and what is decided again repeats "
            f"{', '.join(_REPEATED)} alone"
        )
    return Decision(**{field: _REPEATED[field](value) for field, value in written.items()})
