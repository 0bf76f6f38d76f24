"""WiSP's online controller of the split between experts and KV."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.sizing.cell_allocation import ALLOCATIONS, allocate, share_anew
from host_offload.sizing.configurator import Streams, cap_misses, histograms_of, turns_of
from host_offload.sizing.miss_curves import (
    LiveCurves,
    PageRecency,
    cold_curves,
    expected_returns,
    page_references,
)
from host_offload.sizing.split import Division, MissCosts, SplitRule, division_of, miss_costs
from host_offload.traces.reader import read_trace
from host_offload.traces.recency import tails

FLOOR_SHARE = 0.5
"""Largest share of the memory that the admission floor takes."""


class LearnedCurves(NamedTuple):
    """State of MvWsa."""

    division: Division
    costs: MissCosts
    """Measured at the start."""
    curves: LiveCurves
    pages: np.ndarray
    """float64[P]: the decayed histogram of KV's distances."""
    held: PageRecency = PageRecency()
    load: tuple[tuple[int, int], ...] = ((0, 0),)
    """(sequences that ran or waited, summed over steps; steps) of the running turn, then of earlier
    turns."""
    rows: int = 0
    """Rows of the largest executable seen."""
    turns: tuple[int, ...] = ()
    """Pages of the last turns, the newest first."""
    split: float | None = None
    """None until the first turn ends: the split stays."""
    cells: np.ndarray | None = None
    """int32[L] of the last decision."""
    shared: int = 0
    """Turns since the last look at layers, which happens every `window` turns."""
    ended: int = 0
    """Turns that have ended."""
    most_running: int | None = None
    """Spec.max_num_seqs"""
    pool: int | None = None
    """KV pages of the last request."""


@dataclasses.dataclass(frozen=True)
class MvWsa:
    """Moves the split between experts and KV to where one more byte has equal value on both sides,
    at the end of every turn (WiSP, MV-WSA, Algorithm 2). docs/explanation/miss_curves.md says what
    is ours, why, and how much the values matter.

    A step is one reference of every layer; the waves of a prefill step count together. The
    admission floor (6) has room for the average number of sequences that ran or waited in the steps
    of the last `window` turns (at most as many as can run at once), each with the context of these
    turns. It takes at most FLOOR_SHARE of the memory.

    - `allocation`: how cap·L slots are shared over layers; other than `uniform` is ours.
    - `kv_miss`: see split.miss_costs.
    - `costs`: used in place of measured ones.
    - `expect_returns`: see expected_returns.
    - `trace`: of the workload. The histograms begin with its turns, as if they had just ended, with
      recency lists and floor empty.
    """

    rule: SplitRule = dataclasses.field(default_factory=SplitRule)
    allocation: str = "uniform"
    kv_miss: str = "swap"
    costs: MissCosts | None = None
    window: int = 8
    expect_returns: bool = True
    trace: str | None = None

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.TURN_END})
    writes: frozenset[str] = frozenset({"cells", "kv_pages"})

    @property
    def needs(self) -> frozenset[str]:
        needs = {"ids", "kv_refs", "kv_pages", "running", "waiting", "bucket", "phase"}
        return frozenset(needs if self.costs is not None else needs | {"costs"})

    def init(self, spec: Spec) -> LearnedCurves:
        """The state before the first turn. Raises SplitError if KV's floor does not fit the budget,
        ValueError for an unknown allocation or a trace of another model, TraceError for a trace
        that cannot be read or has no turns."""
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"cells are {', '.join(ALLOCATIONS)}, not {self.allocation!r}")
        if self.window < 1:
            raise ValueError(f"window is at least 1, not {self.window}")
        division, costs = division_of(spec), self.costs
        if costs is None:
            assert spec.costs is not None, "the controller refuses a policy without its costs"
            costs = miss_costs(spec.costs, spec, self.kv_miss)
        pages = np.zeros(max(int(division.pages[0]), 1))
        curves = cold_curves(spec.layers, spec.experts)
        state = LearnedCurves(division, costs, curves, pages, most_running=spec.max_num_seqs)
        return state if self.trace is None else self._with_trace(state, self.trace, spec)

    def _with_trace(self, state: LearnedCurves, directory: str, spec: Spec) -> LearnedCurves:
        trace = read_trace(directory)
        header = trace.header
        had = header.layers, header.experts, header.spec.get("page_tokens", spec.page_tokens)
        if had != (spec.layers, spec.experts, spec.page_tokens):
            raise ValueError(
                f"{directory} is of another model: {had[0]} layers of {had[1]} experts, pages of "
                f"{had[2]} tokens; this one has {spec.layers} of {spec.experts}, pages of "
                f"{spec.page_tokens}"
            )
        if not (ended := sum(len(turn.pages) > 0 for turn in turns_of(trace))):
            raise ValueError(f"no request ends in {directory}: it has no turn to begin with")
        known = Streams(state.curves.histogram, np.append(state.pages, 0.0))
        for found in histograms_of(turns_of(trace), len(state.pages)):
            known = known.then(found, self.rule.decay)
        curves = state.curves._replace(histogram=known.experts)
        # Distances beyond the largest pool are dropped here.
        return state._replace(curves=curves, pages=known.pages[:-1], ended=ended)

    def decide(self, state: LearnedCurves, seen: Observation) -> tuple[LearnedCurves, Decision]:
        if seen.moment == Moment.STEP_END:
            (load, steps), *before = state.load
            rows = max(state.rows, seen.bucket) if seen.phase.all() else state.rows
            now = load + seen.running + seen.waiting, steps + 1
            return state._replace(
                curves=state.curves.see(seen.ids), load=(now, *before), rows=rows
            ), Decision()
        return self._after_turn(state, seen)

    def division_now(self, state: LearnedCurves) -> Division:
        """The memory to divide, with the admission floor from what was seen."""
        division, rows = state.division, max(state.rows, 1)
        load, steps = np.sum(state.load, axis=0).tolist()
        concurrent = min(-(-load // max(steps, 1)), state.most_running or rows, rows)
        context = -(-sum(state.turns) // max(len(state.turns), 1))
        most = int(FLOOR_SHARE * division.pages_at(0))
        floor = max(division.floor_pages, min(concurrent * context, most))
        floor = min(floor, division.pages_at(division.least_cap))
        return dataclasses.replace(division, floor_pages=floor)

    def _after_turn(
        self, state: LearnedCurves, seen: Observation
    ) -> tuple[LearnedCurves, Decision]:
        held, distances = page_references(state.held, seen.kv_refs, len(state.pages))
        gathered = np.bincount(distances, minlength=len(state.pages))
        state = state._replace(
            curves=state.curves.forget(self.rule.decay),
            held=held,
            pages=self.rule.decay * state.pages + gathered,
            turns=(len(seen.kv_refs), *state.turns)[: self.window],
            ended=state.ended + 1,
        )
        division = self.division_now(state)
        state = state._replace(load=((0, 0), *state.load)[: self.window])
        before = state.split
        if before is None:
            units = -(-seen.kv_pages // division.unit_pages)
            before = max(1 - units * division.unit / division.total_bytes, 0.0)
        misses = state.curves.misses[:, : division.caps + 1]
        curve = cap_misses(misses, self.allocation)
        pages = state.pages
        if self.expect_returns:
            pages = pages + expected_returns(held, len(pages), self.rule.decay, state.ended)
        split = self.rule.next_split(before, division, curve, tails(pages), state.costs)
        state, cap = state._replace(split=split), division.cap_at(split)
        slots, cells = cap * len(misses), None
        if split != before:
            cells = allocate(self.allocation, misses, slots).cells
        elif self.allocation != "uniform" and state.shared == self.window - 1:
            # The split stays; cells may have moved between layers.
            had = np.full(len(misses), cap) if state.cells is None else state.cells
            cells = share_anew(self.allocation, misses, slots, had, gate=self.rule.gate)
        if cells is None:
            return state._replace(shared=(state.shared + 1) % self.window), again(state, seen)
        if state.cells is not None and np.array_equal(cells, state.cells):
            return state, again(state, seen)
        kv_pages = division.pages_at(cap)
        cells = cells.astype(np.int32)
        state = state._replace(cells=cells, pool=kv_pages, shared=0)
        return state, Decision(cells=cells, kv_pages=kv_pages)


def again(state: LearnedCurves, seen: Observation) -> Decision:
    """Repeats the last resize request if the pool differs from it: the request still waits, the
    device refused it, or KV got slots because requests were stuck."""
    if state.pool in (None, seen.kv_pages):
        return Decision()
    return Decision(cells=state.cells, kv_pages=state.pool)
