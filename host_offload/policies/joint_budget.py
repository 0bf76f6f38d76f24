"""Batch width, KV and experts decided together while requests run."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.joint import (
    DecodeModel,
    JointChoice,
    cap_beside,
    choose,
    resident_seconds,
    widened,
)
from host_offload.live_curves import LiveCurves, cold_curves
from host_offload.policy import Decision, Moment, Observation, Spec
from host_offload.split import Division, division_of, miss_costs


class Load(NamedTuple):
    """State of JointBudget."""

    division: Division
    miss_s: float
    widths: np.ndarray
    """int64[n]: 1 … the rows of the largest executable."""
    resident_s: np.ndarray
    """float64[n]"""
    curves: LiveCurves
    rows: float = 0.0
    """Decayed sums over decode steps, of their rows and of themselves."""
    steps: float = 0.0
    pages: float = 0.0
    """Decayed mean of the pages that a turn ends with."""
    chosen: JointChoice | None = None


@dataclasses.dataclass(frozen=True)
class JointBudget:
    """Chooses how many sequences run at once, how much KV they get and how many cells a layer has,
    for the most predicted tokens a second (ours; see host_offload.joint), whenever a turn ends.

    Misses by width are those of the decode steps seen, carried over to other widths as if sequences
    were independent. Demand is what runs and waits. Needs measured costs.
    """

    decay: float = 0.8
    """Of all that is learned, once a burst."""
    gate: float = 0.02
    """The least predicted gain that changes anything."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.BURST_END})
    needs: frozenset[str] = frozenset({"ids", "phase", "kv_refs", "running", "waiting", "costs"})
    writes: frozenset[str] = frozenset({"cells", "kv_pages", "max_running"})

    def init(self, spec: Spec) -> Load:
        """Raises SplitError where KV's floor does not fit."""
        assert spec.costs is not None, "the controller refuses a policy without its costs"
        widths = np.arange(1, max(spec.costs.step_s) + 1)
        return Load(
            division_of(spec),
            miss_costs(spec.costs, spec).expert_s,
            widths,
            resident_seconds(spec.costs.step_s, widths),
            cold_curves(spec.layers, spec.experts),
        )

    def decide(self, state: Load, observation: Observation) -> tuple[Load, Decision]:
        seen: Any = observation
        if seen.moment == Moment.STEP_END:
            if not seen.phase.all():
                return state, Decision()
            state = state._replace(
                curves=state.curves.see(seen.ids),
                rows=state.rows + len(seen.phase),
                steps=state.steps + 1,
            )
            return state, Decision()
        turn, keep = float(len(seen.kv_refs)), self.decay
        state = state._replace(
            curves=state.curves.forget(keep),
            pages=turn if not state.pages else keep * state.pages + (1 - keep) * turn,
        )
        if state.steps < 1 or cap_beside(state.division, state.pages) is None:
            return state, Decision()
        model = self.model(state)
        demand = seen.running + seen.waiting
        found = choose(model, state.division, pages_per_sequence=state.pages, demand=demand)
        state = state._replace(rows=keep * state.rows, steps=keep * state.steps)
        if not self._gains(state, model, found, demand):
            return state, Decision()
        cells = np.full(len(state.curves.histogram), found.cap, np.int32)
        return state._replace(chosen=found), Decision(
            cells=cells, kv_pages=found.pages, max_running=found.width
        )

    def model(self, state: Load) -> DecodeModel:
        """Steps by width and cap, by what is known."""
        misses = state.curves.misses[:, : state.division.caps + 1].sum(axis=0) / state.steps
        layers, experts = state.curves.histogram.shape
        absent = layers * (experts - np.arange(len(misses), dtype=np.float64))
        width = state.rows / state.steps
        by_width = widened(misses, width, state.widths, absent)
        return DecodeModel(state.widths, by_width, state.resident_s, state.miss_s)

    def _gains(self, state: Load, model: DecodeModel, found: JointChoice, demand: int) -> bool:
        """Whether it is better enough than what was chosen last, by what is known now."""
        last = state.chosen
        if last is None:
            return True
        if (last.width, last.cap) == (found.width, found.cap):
            return False
        width = min(last.width, max(demand, 1))
        held = last.pages >= width * state.pages
        rate = width / model.step_s(width, last.cap)
        return not held or found.tokens_per_s > (1 + self.gate) * rate
