"""Batch width, KV and experts decided together while requests run."""

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
    """Decayed mean of the pages that a turn ends with."""
    chosen: JointChoice | None = None
    limit: int = 0
    """The max_running that was decided with it."""
    model: DecodeModel | None = None
    """Made at the last turn's end."""
    demand: int = 0
    """Sequences that ran or waited when this was looked at last."""


@dataclasses.dataclass(frozen=True)
class JointBudget:
    """Chooses how many sequences run at once, how much KV they get and how many cells a layer has,
    for the most predicted tokens a second (ours; docs/how-to/memory.md, host_offload.sizing.joint),
    whenever a turn ends, and as soon as more want to run than when it chose last: what was right
    for a few would else keep arrivals waiting until one of the few ends.

    Fewer sequences than can run at once are let run only where a narrower batch than the demand is
    predicted to be faster. Where the pool is not what was asked for, since the device refused it or
    requests were stuck, a turn's end asks again. Misses by width are those of the decode steps
    seen, carried over as if sequences were independent. A sequence needs the KV that turns ended
    with lately; one that waits, its prompt's if that is more. Needs measured costs.
    """

    decay: float = 0.8
    """Factor on all that is learned, once a turn."""
    gate: float = 0.02
    """The least predicted gain that changes anything."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    needs: frozenset[str] = frozenset(
        {"ids", "phase", "kv_refs", "kv_pages", "running", "waiting", "waiting_tokens", "costs"}
    )
    writes: frozenset[str] = frozenset({"cells", "kv_pages", "max_running"})

    def init(self, spec: Spec) -> MemoryLoad:
        """Raises SplitError where KV's floor does not fit."""
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
        # As the curves do at the next turn's end.
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
        """Steps by width and cap, by what is known."""
        misses = state.curves.misses[:, : state.division.caps + 1].sum(axis=0) / state.steps
        layers, experts = state.curves.histogram.shape
        absent = layers * (experts - np.arange(len(misses), dtype=np.float64))
        width = state.rows / state.steps
        by_width = widen(misses, width, state.widths, absent)
        return DecodeModel(state.widths, state.resident_s[:, None] + state.miss_s * by_width)

    def _is_gain(
        self, state: MemoryLoad, model: DecodeModel, found: JointChoice, limit: int, pages: float
    ) -> bool:
        """Whether it is better enough than what was chosen last, by what is known now."""
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
    """Pages that a sequence needs, the mean of those that run and wait."""
    if not seen.waiting:
        return state.pages
    prompt = -(-seen.waiting_tokens // (seen.waiting * state.division.page_tokens))
    waiting = seen.waiting * max(state.pages, float(prompt))
    return (seen.running * state.pages + waiting) / (seen.running + seen.waiting)
