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
    """int32[L] that the hot set was made for; None: still warming up."""
    again: int = 0
    """Steps until the hot set is staged once more; 0: it was."""
    shared: int = -1
    """Cells that were shared over layers by a ranking of all of them (HotTable)."""


@dataclasses.dataclass(frozen=True)
class Static:
    """Keeps in each layer the experts that are used most, and lets no other one in.

    The hot set is as large as the layer has cells: those of the largest `counts`, or those that
    most rows were routed to during the first `warmup` rows (ties: the lower id), while LRU runs.
    From then on the hot ones have the largest prior, are staged until they are resident, and fill
    when they miss; the others are read through. The set is staged a second time, because steps that
    were under way may have evicted some of it, and cut anew when the budget moves.
    """

    warmup: int = 2048
    """Token rows of prompts and output that are counted."""
    counts: tuple[tuple[int, ...], ...] | None = None
    """Uses of each expert in each layer, of a profile (fit); None: from the warm-up."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts", "phase", "cells"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "fill_version", "stages"})
    """Without "stages" nobody is staged: the hot ones come when they miss, and transfers are
    somebody else's."""
    victim_weights: tuple[int, int, int] = (1, 0, 0)
    spare: int = 0
    """Cells of each layer that the hot set leaves to who comes ahead of need."""

    @classmethod
    def fit(cls, trace: Trace) -> Static:
        """With the experts of each layer that most tokens of a trace chose."""
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
    """The hot table of PreScope (section 5): Static, but the hot set is the most used experts of
    all layers together, so that a layer with flat routing gets fewer cells than one with a few
    favourites. Once it is known the cells that there are move between layers accordingly, and again
    when their number has changed. A layer keeps its least cells and never has more than it can.
    """

    writes: frozenset[str] = Static.writes | {"cells"}
    least: int = 0
    """Cells that each layer keeps in any case."""

    def decide(self, state: SeenExperts, seen: Observation) -> tuple[SeenExperts, Decision]:
        state, decision = super().decide(state, seen)
        if state.cells is None or state.shared == (total := int(state.cells.sum())):
            return state, decision
        cells = share_by_rank(state.counts, total, max(self.least, self.spare))
        return state._replace(shared=total), dataclasses.replace(decision, cells=cells)


def share_by_rank(counts: np.ndarray, slots: int, least: int = 0) -> np.ndarray:
    """int32[L]: how many of the `slots` most used experts of all layers each layer has, but at
    least `least`. counts: int[L, E]."""
    best = -np.sort(-counts, axis=1)
    left = best.sum(axis=1)[:, None] - np.cumsum(best, axis=1)
    misses = np.concatenate([best.sum(axis=1)[:, None], left], axis=1)
    return allocate("marginal", misses, slots, least=least).cells.astype(np.int32)


def hot_beside_prefetches(spare: int) -> HotTable:
    """The hot table of PreScope beside its buffers (section 4.4): of each layer `spare` cells are
    left to who comes ahead of need, the layer's own prefetch group, so that what comes for one
    layer never overwrites what another one reads. Who is loaded on demand and is not hot gets no
    cell: it is read through, by way of the two buffers of the native queue, one of which is filled
    while the other one is read. It stages nobody, since prefetches are the placement's."""
    return HotTable(spare=spare, writes=HotTable.writes - {"stages"})
