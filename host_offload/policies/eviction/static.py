"""A static hot set."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.traces.reader import Trace
from pallas_kernels.plan.victim import MAX_PRIOR


class SeenExperts(NamedTuple):
    """State of Static."""

    counts: np.ndarray
    """int64[L, E] so far."""
    rows: int
    cells: np.ndarray | None
    """int32[L] that the hot set was made for; None: still warming up."""
    again: int = 0
    """Steps until the hot set is staged once more; 0: it was."""
    shared: int = -1
    """Cells that were shared over layers by a ranking of all of them (HotTable)."""


@dataclasses.dataclass(frozen=True)
class Static:
    """Keeps in each layer the experts that are used most, and lets no other one in.

    The hot set is as large as the layer has cells: the first ones of `hot`, or those that most
    rows were routed to during the first `warmup` rows (ties: the lower id), while LRU runs. From
    then on the hot ones have the largest prior, are staged until they are resident, and fill when
    they miss; the others are read through. The set is staged a second time, because steps that were
    under way may have evicted some of it, and cut anew when the budget moves.
    """

    warmup: int = 2048
    """Token rows of prompts and output that are counted."""
    hot: tuple[tuple[int, ...], ...] | None = None
    """Experts of each layer, the hottest first; None: from the warm-up."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts", "phase", "cells"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "fill_version", "stages"})
    """Without "stages" nobody is staged: the hot ones come when they miss, and transfers are
    somebody else's."""
    victim_weights: tuple[int, int, int] = (1, 0, 0)
    spare: int = 0
    """Cells of each layer that the hot set leaves to who comes ahead of need."""

    @property
    def known(self) -> bool:
        """Whether it needs no warm-up."""
        return self.hot is not None

    def init(self, spec: Spec) -> SeenExperts:
        if self.spare < 0:
            raise ValueError(f"spare cells of a layer are 0 or more, not {self.spare}")
        counts = np.zeros((spec.layers, spec.experts), np.int64)
        if self.hot is not None:
            if len(self.hot) != spec.layers:
                raise ValueError(f"hot names experts of {len(self.hot)} layers, not {spec.layers}")
            for layer, experts in enumerate(self.hot):
                if len(set(experts)) != len(experts) or not all(
                    0 <= e < spec.experts for e in experts
                ):
                    raise ValueError(
                        f"hot[{layer}] must be different experts in 0…{spec.experts - 1}"
                    )
                counts[layer, list(experts)] = np.arange(len(experts), 0, -1)
        return SeenExperts(counts, 0, None)

    def decide(self, state: SeenExperts, observation: Observation) -> tuple[SeenExperts, Decision]:
        seen: Any = observation
        rows = state.rows + len(seen.phase)
        if state.cells is None:
            counts = state.counts if self.known else state.counts + seen.counts
            state = state._replace(counts=counts, rows=rows)
            if not self.known and rows < self.warmup:
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
        state = state._replace(rows=rows, cells=seen.cells, again=observation.age + 2)
        return state, Decision(
            victim_weights=np.array([1, 0, 1]),
            prior=np.where(hot, MAX_PRIOR, 0),
            fill_version=np.where(hot, 0, -1),
            stages=stages,
        )


def fit(trace: Trace) -> Static:
    """Static with the experts of each layer that most tokens of a trace chose first."""
    ids, experts = trace.array("token.ids"), trace.header.experts
    counts = [
        np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])
    ]
    return Static(hot=tuple(tuple(np.argsort(-c, kind="stable").tolist()) for c in counts))
