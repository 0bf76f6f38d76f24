"""WiSP's closed-form split where every expert is resident in one of two versions."""

from __future__ import annotations

import dataclasses

from host_offload.control.interface import Decision, Observation, Spec
from host_offload.policies.budget.peak_headroom import PeakHeadroom, Peaks


@dataclasses.dataclass(frozen=True)
class ResidentHeadroom(PeakHeadroom):
    """PeakHeadroom that says KV's pages only: experts have all other slots, and how many of them
    are high follows (ResidentSpec.most_high).

    The unit of C is one slot for each layer, as there, and the least C the slots of all experts in
    the low version with the spares, rounded up to that unit. Ours: the paper has one version.
    """

    writes: frozenset[str] = frozenset({"kv_pages"})

    def init(self, spec: Spec) -> Peaks:
        """Raises ValueError unless every expert is resident, and as PeakHeadroom.init."""
        if spec.resident is None:
            raise ValueError("ResidentHeadroom is for two versions with every expert resident")
        least = -(-spec.resident.least_slots() // spec.layers)
        return PeakHeadroom.init(dataclasses.replace(self, least_cap=least), spec)

    def decide(self, state: Peaks, observation: Observation) -> tuple[Peaks, Decision]:
        state, decision = super().decide(state, observation)
        return state, dataclasses.replace(decision, cells=None)
