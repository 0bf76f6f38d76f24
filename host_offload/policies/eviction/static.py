"""A static hot set, of each layer or ranked over all of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage, routed_counts
from host_offload.sizing.cell_allocation import allocate
from host_offload.traces.reader import Trace
from pallas_kernels.plan.victim import MAX_PRIOR


class SeenExperts(NamedTuple):
    """State of Static."""

    counts: np.ndarray
    """int64[L, E] so far."""
    rows: int = 0
    cells: np.ndarray | None = None
    """int32[L]: the cells for which the hot set was made; None: still warming up."""
    again: int = 0
    """Steps until the hot set is staged a second time; 0: that is done."""
    shared: int = -1
    """Cells that a ranking over all layers shared (HotTable)."""


@dataclasses.dataclass(frozen=True)
class Static:
    """Keeps the most used experts of each layer resident, and caches no others.

    The hot set has as many experts as the layer has cells: those with the largest `counts`, or
    those to which most of the first `warmup` rows were routed, while LRU runs (ties: the lower id).
    From then on hot experts have the largest prior, are staged until they are resident, and fill
    when they miss. Others are read through. The set is staged a second time, because running steps
    may have evicted some of it, and chosen again when the budget changes.
    """

    warmup: int = 2048
    """Token rows of prompts and output that are counted."""
    counts: tuple[tuple[int, ...], ...] | None = None
    """Uses of each expert in each layer, from a profile (fit); None: from the warm-up."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts", "phase", "cells"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "fill_version", "stages"})
    """Without "stages" nothing is staged: hot experts come when they miss, and another policy
    decides transfers."""
    victim_weights: tuple[int, int, int] = (1, 0, 0)
    spare: int = 0
    """Cells of each layer that the hot set leaves to prefetched experts."""

    @classmethod
    def fit(cls, trace: Trace) -> Static:
        """The policy with the counts of a trace."""
        counts = routed_counts(trace.array("token.ids"), trace.header.experts)
        return cls(counts=tuple(map(tuple, counts.tolist())))

    def init(self, spec: Spec) -> SeenExperts:
        """Raises ValueError for counts of another model."""
        if self.counts is None:
            return SeenExperts(np.zeros((spec.layers, spec.experts), np.int64))
        counts = np.array(self.counts, np.int64)
        if counts.shape != (spec.layers, spec.experts):
            raise ValueError(
                f"counts are of {'×'.join(map(str, counts.shape))} experts, and the model has "
                f"{spec.layers} layers of {spec.experts}"
            )
        return SeenExperts(counts)

    def decide(self, state: SeenExperts, seen: Observation) -> tuple[SeenExperts, Decision]:
        rows = state.rows + len(seen.phase)
        if state.cells is None:
            warm = self.counts is not None
            counts = state.counts if warm else state.counts + seen.counts
            state = state._replace(counts=counts, rows=rows)
            if not warm and rows < self.warmup:
                return state, Decision()
        elif np.array_equal(state.cells, seen.cells) and state.again != 1:
            return state._replace(again=max(state.again - 1, 0)), Decision()
        order = np.argsort(-state.counts, axis=1, kind="stable")
        rank = np.argsort(order, axis=1)
        hot = (rank < seen.cells[:, None] - self.spare) & (state.counts > 0)
        # The hottest of all layers first: each transfer saves as much as it can.
        layer, expert = np.nonzero(hot)
        first = np.argsort(-state.counts[layer, expert], kind="stable")
        stages = None
        if "stages" in self.writes:
            stages = tuple(Stage(int(layer[i]), int(expert[i]), cause="hot") for i in first)
        if state.again == 1:
            return state._replace(again=0), Decision(stages=stages)
        state = state._replace(rows=rows, cells=seen.cells, again=seen.age + 2)
        return state, Decision(
            victim_weights=np.array([1, 0, 1]),
            prior=np.where(hot, MAX_PRIOR, 0),
            fill_version=np.where(hot, 0, -1),
            stages=stages,
        )


@dataclasses.dataclass(frozen=True)
class HotTable(Static):
    """The hot table of PreScope (section 5): Static, with the most used experts of all layers
    together as the hot set. So a layer with flat routing gets fewer cells than one with a few hot
    experts.

    When the set is known, cells move between layers accordingly, and again when their number
    changes. A layer keeps `least` cells and never has more than experts.
    """

    writes: frozenset[str] = Static.writes | {"cells"}
    least: int = 0
    """Cells that each layer keeps at least."""

    def decide(self, state: SeenExperts, seen: Observation) -> tuple[SeenExperts, Decision]:
        state, decision = super().decide(state, seen)
        if state.cells is None or state.shared == (total := int(state.cells.sum())):
            return state, decision
        cells = share_by_rank(state.counts, total, max(self.least, self.spare))
        return state._replace(shared=total), dataclasses.replace(decision, cells=cells)


def share_by_rank(counts: np.ndarray, slots: int, least: int = 0) -> np.ndarray:
    """int32[L]: how many of the `slots` most used experts of all layers each layer has, at least
    `least`.

    - `counts`: int[L, E].
    """
    best = -np.sort(-counts, axis=1)
    left = best.sum(axis=1)[:, None] - np.cumsum(best, axis=1)
    misses = np.concatenate([best.sum(axis=1)[:, None], left], axis=1)
    return allocate("marginal", misses, slots, least=least).cells.astype(np.int32)


def hot_beside_prefetches(spare: int) -> HotTable:
    """The hot table of PreScope beside its buffers (section 4.4).

    `spare` cells of each layer are left to prefetched experts, so a prefetch for one layer never
    overwrites what another layer reads. An expert that is loaded on demand and not hot gets no
    cell: it is read through the two buffers of the native queue, one of which is filled while the
    other is read. The policy stages nothing, since the placement decides prefetches.
    """
    return HotTable(spare=spare, writes=HotTable.writes - {"stages"})
