"""The placement of a run, taken again: the same decisions at the same layers of the same steps.

Where two processors have other bits, outputs are a function of who computed what. A trace has that,
and this policy repeats it, so the same requests get the same bits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError

PREFIX = "recorded="
"""What the name of such a placement begins with; a trace's directory follows."""

Place = tuple[int, Moment, int]
"""Step, moment and layer of a decision."""


@dataclasses.dataclass(frozen=True)
class RecordedPlacement:
    """Decides what the placement of a recorded run did, transfers ahead of need too. Of the same
    requests in the same order, on an engine with the same budgets and eviction policy, residents
    are then the same at every layer, and so is who computes what. Needs driver="host"."""

    trace: str
    decisions: Mapping[Place, Decision] = dataclasses.field(repr=False)

    needs: frozenset[str] = frozenset({"counts"})

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset({moment for _, moment, _ in self.decisions} | {Moment.EXPERTS_BEGIN})

    @property
    def writes(self) -> frozenset[str]:
        staged = any(decision.stages is not None for decision in self.decisions.values())
        return frozenset({"execute", "load_order", *(["stages"] if staged else [])})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        """Raises ValueError for a step or layer that the trace has no decision of."""
        assert observation.layer is not None
        place = observation.step, observation.moment, observation.layer
        found = self.decisions.get(place)
        if found is None:
            if observation.moment != Moment.EXPERTS_BEGIN:
                return state, Decision()
            raise ValueError(
                f"{self.trace} has no placement of step {place[0]}, layer {place[2]}: this run has "
                "other requests than the recorded one"
            )
        return state, found


def recorded_placement(trace: Trace) -> RecordedPlacement:
    """The policy that repeats a trace's placement. Raises TraceError for a run without one."""
    found: dict[Place, Decision] = {}
    routed: Counter[int] = Counter()
    """Step → its layers so far: EXPERTS_BEGIN comes once a layer, in their order."""
    for line in trace.decided():
        if line["policy"] not in (PlacementPolicy.__name__, RecordedPlacement.__name__):
            continue
        step, moment = line["step"], Moment[line["moment"]]
        found[step, moment, routed[step]] = _decision(line["decision"])
        routed[step] += moment == Moment.EXPERTS_BEGIN
    if not found:
        raise TraceError(f"{trace.directory} is of a run without a placement")
    return RecordedPlacement(str(trace.directory), found)


def _decision(said: Mapping[str, Any]) -> Decision:
    stages = said.get("stages")
    return Decision(
        execute=np.array(said["execute"], np.int8) if "execute" in said else None,
        load_order=np.array(said["load_order"], np.int16) if "load_order" in said else None,
        stages=None if stages is None else tuple(Stage(*entry) for entry in stages),
    )
