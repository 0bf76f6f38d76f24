"""The decisions of a recorded run, taken again.

Decisions that depend on times, such as those of searches beside inference, cannot be computed
again; and where two processors have other bits, outputs are a function of who computed what. A
trace has the decisions, and this policy repeats them.
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
    """Decides what a policy of a recorded run did, at the same moments of the same steps. Of the
    same requests in the same order, on an engine with the same budgets, residents are then the
    same at every layer, and so is who computes what."""

    policy_name: str
    """Class of the policy that decided."""
    trace: str
    decisions: tuple[tuple[int, Moment, Decision], ...] = dataclasses.field(
        repr=False, compare=False
    )
    """(step, moment, decision), in their order."""
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
        """How many decisions were taken."""
        return 0

    def decide(self, state: int, seen: Observation) -> tuple[int, Decision]:
        """Raises TraceError for a step or moment that the trace has no decision of."""
        here = seen.step, seen.moment
        if state < len(self.decisions) and self.decisions[state][:2] == here:
            return state + 1, self.decisions[state][2]
        if seen.moment == Moment.LAYER_BEGIN:  # where a placement says something at times
            return state, Decision()
        raise TraceError(
            f"{self.trace} has no decision of {self.policy_name} at {here[1].name} of step "
            f"{here[0]}, layer {seen.layer}: this run has other requests than the recorded "
            "one"
        )


def repeat_run(trace: Trace, policy: type | Policy) -> RecordedPolicy:
    """The policy that repeats what `policy`, or the one of that class, decided in the run of a
    trace: one that decides at each of its moments while steps are made, of transfers, priors and
    who computes. Raises TraceError for a trace without its decisions, or with others."""
    name = (policy if isinstance(policy, type) else type(policy)).__name__
    found = tuple(
        (line["step"], Moment[line["moment"]], _decision(name, line["decision"]))
        for line in trace.policy_decisions()
        if line["policy"] == name
    )
    if not found:
        raise TraceError(f"{trace.directory} has no decisions of {name}")
    weights, pool = getattr(policy, "victim_weights", None), getattr(policy, "pool", False)
    return RecordedPolicy(name, str(trace.directory), found, weights, pool)


_REPEATED: dict[str, Callable[[Any], Any]] = {
    "prior": lambda value: np.array(value, np.int32),
    "execute": lambda value: np.array(value, np.int8),
    "load_order": lambda value: np.array(value, np.int16),
    "stages": lambda value: tuple(Stage(*entry) for entry in value),
}
"""Field of a Decision → its value, of that in a trace."""


def _decision(name: str, written: dict[str, Any]) -> Decision:
    if others := sorted(written.keys() - _REPEATED.keys()):
        raise TraceError(
            f"{name} decided {others[0]}, and what is decided again repeats "
            f"{', '.join(_REPEATED)} alone"
        )
    return Decision(**{field: _REPEATED[field](value) for field, value in written.items()})
