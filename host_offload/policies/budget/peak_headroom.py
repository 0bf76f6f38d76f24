"""WiSP's closed-form split: KV gets its peak plus headroom, experts get the rest. For one version,
or for two with every expert resident."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.sizing.split import Division, division_of, peak_headroom


class Peaks(NamedTuple):
    """State of PeakHeadroom."""

    division: Division
    layers: int
    now: int = 0
    """Most pages in use since the last turn ended, on the device and swapped out."""
    short: bool = False
    """Whether a request has waited since then because its prompt did not fit."""
    before: tuple[int, ...] = ()
    """Peaks of the last turns."""


@dataclasses.dataclass(frozen=True)
class PeakHeadroom:
    """Equations (8) to (10) of WiSP's Appendix D at the end of every turn, while requests run.

    The peak is that of the last `window` turns. Pages that were swapped out count as in use. If a
    prompt had to wait for pages, the pool grows at least by the dead zone, since a full pool hides
    how much is wanted (docs/explanation/miss_curves.md). The paper does not give the values, so
    they are ours. Every layer has the same number of cells.
    """

    headroom: float = 0.1
    """h"""
    dead: int = 2
    """Δ_C, in cells of each layer."""
    window: int = 16
    least_cap: int | None = None
    """C_min; None: top-k, as in the paper, or less if KV's floor leaves less. This engine can run
    without any cell."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    needs: frozenset[str] = frozenset(
        {"kv_used", "kv_swapped", "kv_pages", "waiting", "waiting_tokens"}
    )
    writes: frozenset[str] = frozenset({"cells", "kv_pages"})

    def init(self, spec: Spec) -> Peaks:
        """Raises SplitError if KV's floor does not fit, ValueError for settings out of range."""
        if self.headroom < 0 or self.dead < 1 or self.window < 1:
            raise ValueError(f"headroom is at least 0, dead and window at least 1: {self}")
        least = self.least_cap
        if least is None:
            least = min(spec.top_k, division_of(spec).largest_cap)
        return Peaks(division_of(spec, least), spec.layers)

    def decide(self, state: Peaks, seen: Observation) -> tuple[Peaks, Decision]:
        division = state.division
        prompt = -(-seen.waiting_tokens // (max(seen.waiting, 1) * division.page_tokens))
        short = seen.waiting > 0 and seen.kv_used + prompt > seen.kv_pages
        held = seen.kv_used + seen.kv_swapped
        state = state._replace(now=max(state.now, held), short=state.short or short)
        if seen.moment == Moment.STEP_END:
            return state, Decision()
        peak = state.now
        if state.short:
            page_bytes = division.unit / division.unit_pages
            wanted = seen.kv_pages + self.dead * division.cap_bytes / page_bytes
            peak = max(peak, math.ceil(wanted / (1 + self.headroom)))
        peaks = (*state.before, peak)[-self.window :]
        units = -(-seen.kv_pages // division.unit_pages)
        cap = (division.total_bytes - units * division.unit) // division.cap_bytes
        found = peak_headroom(
            division, peak_pages=max(peaks), headroom=self.headroom, cap=cap, dead=self.dead
        )
        state = state._replace(now=held, short=False, before=peaks)
        if found is None:
            return state, Decision()
        cells = np.full(state.layers, found, np.int32)
        return state, Decision(cells=cells, kv_pages=division.pages_at(found))


@dataclasses.dataclass(frozen=True)
class ResidentHeadroom(PeakHeadroom):
    """PeakHeadroom that decides only KV's pages. Experts have all other slots, and the number of
    high experts follows from that (ResidentSpec.most_high).

    The unit of C is one slot for each layer, as in PeakHeadroom. The least C has the slots of all
    experts in the low version and the spares, rounded up to that unit. Ours: the paper has one
    version.
    """

    writes: frozenset[str] = frozenset({"kv_pages"})

    def init(self, spec: Spec) -> Peaks:
        """Raises ValueError unless every expert is resident, and as PeakHeadroom.init."""
        if spec.resident is None:
            raise ValueError("ResidentHeadroom is for two versions with every expert resident")
        least = -(-spec.resident.least_slots() // spec.layers)
        return PeakHeadroom.init(dataclasses.replace(self, least_cap=least), spec)

    def decide(self, state: Peaks, seen: Observation) -> tuple[Peaks, Decision]:
        state, decision = super().decide(state, seen)
        return state, dataclasses.replace(decision, cells=None)
