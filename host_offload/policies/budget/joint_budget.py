"""Decides batch width, KV and experts together while requests run."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.sizing.joint import (
    DecodeModel,
    JointChoice,
    cap_beside,
    choose,
    resident_seconds,
    widen,
)
from host_offload.sizing.miss_curves import LiveCurves, cold_curves
from host_offload.sizing.split import Division, division_of, miss_costs


class MemoryLoad(NamedTuple):
    """State of JointBudget."""

    division: Division
    miss_s: float
    widths: np.ndarray
    """int64[n]: 1 … the most sequences that can run at once."""
    resident_s: np.ndarray
    """float64[n]"""
    curves: LiveCurves
    rows: float = 0.0
    """Decayed sums over decode steps, of their rows and of themselves."""
    steps: float = 0.0
    pages: float = 0.0
    """Decayed mean of a turn's pages at its end."""
    chosen: JointChoice | None = None
    limit: int = 0
    """The max_running of the last decision."""
    model: DecodeModel | None = None
    """The model from the end of the last turn."""
    demand: int = 0
    """Sequences that ran or waited at the last decision."""


@dataclasses.dataclass(frozen=True)
class JointBudget:
    """Chooses how many sequences run at once, how much KV they get and how many cells a layer has,
    for the most predicted tokens a second (ours; docs/how-to/memory.md, host_offload.sizing.joint).

    It chooses when a turn ends, and when more sequences want to run than at the last choice: new
    requests would otherwise wait until one of a few running ones ends. The batch is narrower than
    the demand only if that is predicted to be faster. If the pool is not as requested, since the
    device refused it or requests were stuck, the end of a turn asks again.

    Misses by width come from the decode steps seen, applied to other widths as if sequences were
    independent. A sequence needs the KV of recent turns at their end; a waiting one needs its
    prompt's KV if that is more. Needs measured costs.
    """

    decay: float = 0.8
    """Factor of everything learned, once a turn."""
    gate: float = 0.02
    """The least predicted gain for a change."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    needs: frozenset[str] = frozenset(
        {"ids", "phase", "kv_refs", "kv_pages", "running", "waiting", "waiting_tokens", "costs"}
    )
    writes: frozenset[str] = frozenset({"cells", "kv_pages", "max_running"})

    def init(self, spec: Spec) -> MemoryLoad:
        """Raises SplitError if KV's floor does not fit."""
        assert spec.costs is not None, "the controller refuses a policy without its costs"
        rows = max(spec.costs.step_s)
        widths = np.arange(1, min(spec.max_num_seqs or rows, rows) + 1)
        return MemoryLoad(
            division_of(spec),
            miss_costs(spec.costs, spec).expert_s,
            widths,
            resident_seconds(spec.costs.step_s, widths),
            cold_curves(spec.layers, spec.experts),
        )

    def decide(self, state: MemoryLoad, seen: Observation) -> tuple[MemoryLoad, Decision]:
        if seen.moment == Moment.STEP_END:
            if seen.phase.all():
                state = state._replace(
                    curves=state.curves.see(seen.ids),
                    rows=state.rows + len(seen.phase),
                    steps=state.steps + 1,
                )
            if state.model is not None and seen.running + seen.waiting > state.demand:
                return self._choose(state, state.model, seen)
            return state, Decision()
        turn, keep = float(len(seen.kv_refs)), self.decay
        state = state._replace(
            curves=state.curves.forget(keep),
            pages=turn if not state.pages else keep * state.pages + (1 - keep) * turn,
        )
        model = self.model(state) if state.steps >= 1 else state.model
        # as the curves do at the end of the next turn
        state = state._replace(model=model, rows=keep * state.rows, steps=keep * state.steps)
        return (state, Decision()) if model is None else self._choose(state, model, seen)

    def _choose(
        self, state: MemoryLoad, model: DecodeModel, seen: Observation
    ) -> tuple[MemoryLoad, Decision]:
        demand = seen.running + seen.waiting
        state, pages = state._replace(demand=demand), pages_each(state, seen)
        if cap_beside(state.division, pages) is None:
            return state, Decision()
        found = choose(model, state.division, pages_per_sequence=pages, demand=demand)
        limit = found.width if found.width < demand else int(state.widths[-1])
        if self._is_gain(state, model, found, limit, pages):
            state = state._replace(chosen=found, limit=limit)
            return state, self._request(state, found)
        last = state.chosen
        if last and seen.moment == Moment.TURN_END and seen.kv_pages != last.pages:
            return state, self._request(state, last)
        return state, Decision()

    def _request(self, state: MemoryLoad, choice: JointChoice) -> Decision:
        cells = np.full(len(state.curves.histogram), choice.cap, np.int32)
        return Decision(cells=cells, kv_pages=choice.pages, max_running=state.limit)

    def model(self, state: MemoryLoad) -> DecodeModel:
        """Predicted steps by width and cap."""
        misses = state.curves.misses[:, : state.division.caps + 1].sum(axis=0) / state.steps
        layers, experts = state.curves.histogram.shape
        absent = layers * (experts - np.arange(len(misses), dtype=np.float64))
        width = state.rows / state.steps
        by_width = widen(misses, width, state.widths, absent)
        return DecodeModel(state.widths, state.resident_s[:, None] + state.miss_s * by_width)

    def _is_gain(
        self, state: MemoryLoad, model: DecodeModel, found: JointChoice, limit: int, pages: float
    ) -> bool:
        """Whether the choice is better than the last one by at least the gate, by current
        knowledge."""
        last = state.chosen
        if last is None:
            return True
        if (last.width, last.cap, state.limit) == (found.width, found.cap, limit):
            return False
        width = min(state.limit, max(state.demand, 1))
        held = last.pages >= width * pages
        rate = width / model.step_s(width, last.cap)
        return not held or found.tokens_per_s > (1 + self.gate) * rate


def pages_each(state: MemoryLoad, seen: Observation) -> float:
    """Pages that a sequence needs: the mean over running and waiting sequences."""
    if not seen.waiting:
        return state.pages
    prompt = -(-seen.waiting_tokens // (seen.waiting * state.division.page_tokens))
    waiting = seen.waiting * max(state.pages, float(prompt))
    return (seen.running * state.pages + waiting) / (seen.running + seen.waiting)
