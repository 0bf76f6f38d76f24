"""A policy that is asked where co-activation prefetch is, sees what it sees and wants nothing: what
looking between layers costs without any prefetch."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Moment, Observation, Spec


@dataclasses.dataclass(frozen=True)
class Onlooker:
    """Looks behind each router at the routing and at a copy of the tables."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"ids", "state"})
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None: ...

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()
