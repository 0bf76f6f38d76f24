"""WiSP's online controller of the split between experts and KV."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.cell_allocation import ALLOCATIONS, Allocation, allocate
from host_offload.configurator import cap_misses
from host_offload.kv_reuse import PageRecency, cold_pages, page_references
from host_offload.live_curves import LiveCurves, cold_curves, tails
from host_offload.policy import Decision, Moment, Observation, Spec
from host_offload.split import Division, MissCosts, SplitRule, division_of, miss_costs
from host_offload.step_times import StepTimes


class Learned(NamedTuple):
    """State of MvWsa."""

    division: Division
    costs: MissCosts
    """As measured at the start."""
    curves: LiveCurves
    held: PageRecency
    pages: np.ndarray
    """float64[P]: the decayed histogram of KV's distances."""
    times: StepTimes
    load: tuple[int, ...] = (0,)
    """Most sequences at once: of the burst that runs, then of those before it."""
    rows: int = 0
    """Of the largest executable seen."""
    turns: tuple[int, ...] = ()
    """Pages of the last turns, the newest first."""
    split: float | None = None
    """None: as it is, until the first burst ends."""
    cells: np.ndarray | None = None
    """int32[L] that was decided last."""
    shared: int = 0
    """Bursts since layers were last looked at."""


@dataclasses.dataclass(frozen=True)
class MvWsa:
    """Moves the line between experts and KV to where a byte more is worth as much on either side
    (WiSP, MV-WSA, Algorithm 2), at the end of every burst.

    The paper ran the estimator in a simulation and preset its costs; here it runs in the engine,
    and what a miss costs is learned from the steps (`calibrate`; see step_times), beginning with
    measured costs; that of moving a page out and back stays as measured. A step is one reference of
    every layer, a sweep's waves taken together. KV's distances beyond the largest pool are
    forgotten: they are misses under every split.

    concurrent: n_conc of the admission floor (6), each with the context of the last turns. None:
    the most sequences that ran or waited during the last `window` bursts, no more than executables
    have rows; requests that never return would else leave KV nothing but one sequence of the
    model's length. Whatever waits, this floor takes at most the part `floor_share` of the memory:
    what a wider batch is worth beyond it is not in equation (4) (see joint_budget).

    allocation: how cap·L slots are shared over layers; other than `uniform` is ours. kv_miss: see
    split.miss_costs. costs: instead of measured ones.
    """

    rule: SplitRule = dataclasses.field(default_factory=SplitRule)
    allocation: str = "uniform"
    calibrate: bool = True
    kv_miss: str = "swap"
    costs: MissCosts | None = None
    concurrent: int | None = None
    window: int = 16
    floor_share: float = 0.5

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.BURST_END})
    writes: frozenset[str] = frozenset({"cells", "kv_pages"})

    @property
    def needs(self) -> frozenset[str]:
        needs = {"ids", "kv_refs", "kv_pages", "running", "waiting", "bucket", "phase"}
        if self.calibrate:
            needs |= {"missed", "compiled"}
        return frozenset(needs if self.costs is not None else needs | {"costs"})

    def init(self, spec: Spec) -> Learned:
        """Nothing is known. Raises SplitError where KV's floor does not fit the budget, ValueError
        for an unknown allocation."""
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"cells are {', '.join(ALLOCATIONS)}, not {self.allocation!r}")
        if self.window < 1 or (self.concurrent is not None and self.concurrent < 1):
            raise ValueError(f"window and concurrent are at least 1: {self}")
        if not 0 <= self.floor_share <= 1:
            raise ValueError(f"floor_share lies in [0, 1], not {self.floor_share}")
        division, costs = division_of(spec), self.costs
        if costs is None:
            assert spec.costs is not None, "the controller refuses a policy without its costs"
            costs = miss_costs(spec.costs, spec, self.kv_miss)
        pages = np.zeros(max(int(division.pages[0]), 1))
        curves = cold_curves(spec.layers, spec.experts)
        return Learned(division, costs, curves, cold_pages(), pages, StepTimes())

    def decide(self, state: Learned, observation: Observation) -> tuple[Learned, Decision]:
        seen: Any = observation
        if seen.moment == Moment.STEP_END:
            if self.calibrate:
                state = state._replace(times=self._timed(state, seen))
            now, *before = state.load
            rows = max(state.rows, seen.bucket) if seen.phase.all() else state.rows
            load = max(now, seen.running + seen.waiting), *before
            return state._replace(
                curves=state.curves.see(seen.ids), load=load, rows=rows
            ), Decision()
        return self._after_burst(state, seen)

    def division_now(self, state: Learned) -> Division:
        """What is divided, with the admission floor by what was seen."""
        division, concurrent = state.division, self.concurrent
        if concurrent is None:
            concurrent = min(max(state.load), max(state.rows, 1))
        context = -(-sum(state.turns) // max(len(state.turns), 1))
        most = int(self.floor_share * division.pages_at(0))
        floor = max(division.floor_pages, min(concurrent * context, most))
        floor = min(floor, division.pages_at(division.least_cap))
        return dataclasses.replace(division, floor_pages=floor)

    def _after_burst(self, state: Learned, seen: Any) -> tuple[Learned, Decision]:
        held, distances = page_references(state.held, seen.kv_refs, len(state.pages))
        gathered = np.bincount(distances, minlength=len(state.pages))
        state = state._replace(
            curves=state.curves.forget(self.rule.decay),
            held=held,
            pages=self.rule.decay * state.pages + gathered,
            turns=(len(seen.kv_refs), *state.turns)[: self.window],
        )
        division = self.division_now(state)
        state = state._replace(load=(0, *state.load)[: self.window])
        before = state.split
        if before is None:
            units = -(-seen.kv_pages // division.unit_pages)
            before = max(1 - units * division.unit / division.total_bytes, 0.0)
        misses = state.curves.misses[:, : division.caps + 1]
        curve = cap_misses(misses, self.allocation)
        costs = self.costs_now(state)
        split = self.rule.next_split(before, division, curve, tails(state.pages), costs)
        state, cap = state._replace(split=split), division.cap_at(split)
        if split == before and not self._is_worth_sharing_anew(state, misses, curve[cap], cap):
            return state._replace(shared=(state.shared + 1) % self.window), Decision()
        cells = self._share(misses, cap).cells.astype(np.int32)
        if state.cells is not None and np.array_equal(cells, state.cells):
            return state, Decision()
        pages = division.pages_at(cap)
        return state._replace(cells=cells, shared=0), Decision(cells=cells, kv_pages=pages)

    def _share(self, misses: np.ndarray, cap: int) -> Allocation:
        return allocate(self.allocation, misses, cap * len(misses))

    def _is_worth_sharing_anew(
        self, state: Learned, misses: np.ndarray, bound: float, cap: int
    ) -> bool:
        """The line stays; layers may have changed among themselves, which is looked at every
        `window` bursts. bound: no allocation has fewer misses, so that where it promises nothing
        none is looked for."""
        if self.allocation == "uniform" or state.shared < self.window - 1:
            return False
        cells = np.full(len(misses), cap) if state.cells is None else state.cells
        now = float(misses[np.arange(len(misses)), cells].sum())
        least = (1 - self.rule.gate) * now
        return bound < least and self._share(misses, cap).misses < least

    def costs_now(self, state: Learned) -> MissCosts:
        """What misses cost by what is known so far."""
        if not self.calibrate:
            return state.costs
        expert_s, page_s = state.costs
        if self.kv_miss == "recompute" and page_s > 0:
            tokens = state.division.page_tokens
            page_s = tokens * state.times.token_s(page_s / tokens)
        return MissCosts(state.times.miss_s(expert_s), page_s)

    def _timed(self, state: Learned, seen: Any) -> StepTimes:
        prompt = len(seen.phase) - int(np.count_nonzero(seen.phase))
        return state.times.see(
            bucket=seen.bucket,
            tokens=prompt,
            misses=int(np.count_nonzero(seen.missed)),
            read_s=seen.seconds,
            usable=not seen.compiled and prompt in (0, len(seen.phase)),
            miss_s=state.times.miss_s(state.costs.expert_s) if prompt else 0.0,
        )
