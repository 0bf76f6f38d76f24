"""The hot table of PreScope (section 5): a static hot set that is ranked over all layers."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Observation, Spec
from host_offload.policies.eviction.static import SeenExperts, Static
from host_offload.sizing.cell_allocation import allocate
from host_offload.traces.reader import Trace


@dataclasses.dataclass(frozen=True)
class HotTable(Static):
    """Static, but the hot set is the most used experts of all layers together, so that a layer with
    flat routing gets fewer cells than one with a few favourites. Once it is known the cells that
    there are move between layers accordingly, and again when their number has changed.

    `counts` are those of a trace (fit); without them the first `warmup` rows count, while layers
    have equal shares. A layer keeps its least cells and never has more than it can.
    """

    counts: tuple[tuple[int, ...], ...] | None = None
    """Uses of each expert in each layer, of a profile."""

    writes: frozenset[str] = Static.writes | {"cells"}
    least: int = 0
    """Cells that each layer keeps in any case."""

    @property
    def known(self) -> bool:
        """Whether it needs no warm-up."""
        return self.counts is not None

    def init(self, spec: Spec) -> SeenExperts:
        """Raises ValueError for counts of another model, or with `hot`, a ranking of each layer."""
        state = super().init(spec)
        if self.hot is not None:
            raise ValueError("a hot table is ranked by counts over all layers; give no hot")
        if self.counts is None:
            return state
        counts = np.array(self.counts, np.int64)
        if counts.shape != (spec.layers, spec.experts):
            raise ValueError(
                f"counts are of {'×'.join(map(str, counts.shape))} experts, and the model has "
                f"{spec.layers} layers of {spec.experts}"
            )
        return state._replace(counts=counts)

    def decide(self, state: SeenExperts, observation: Observation) -> tuple[SeenExperts, Decision]:
        state, decision = super().decide(state, observation)
        if state.cells is None or state.shared == (total := int(state.cells.sum())):
            return state, decision
        cells = shared_by_rank(state.counts, total, max(self.least, self.spare))
        return state._replace(shared=total), dataclasses.replace(decision, cells=cells)


def shared_by_rank(counts: np.ndarray, slots: int, least: int = 0) -> np.ndarray:
    """int32[L]: how many of the `slots` most used experts of all layers each layer has, but at
    least `least`. counts: int[L, E]."""
    best = -np.sort(-counts, axis=1)
    left = best.sum(axis=1)[:, None] - np.cumsum(best, axis=1)
    misses = np.concatenate([best.sum(axis=1)[:, None], left], axis=1)
    return allocate("marginal", misses, slots, least=least).cells.astype(np.int32)


def beside_prefetches(spare: int) -> HotTable:
    """The hot table of PreScope beside its buffers (section 4.4): of each layer `spare` cells are
    left to who comes ahead of need, the layer's own prefetch group, so that what comes for one
    layer never overwrites what another one reads. Who is loaded on demand and is not hot gets no
    cell: it is read through, by way of the two buffers of the native queue, one of which is filled
    while the other one is read. It stages nobody, since prefetches are the placement's."""
    return HotTable(spare=spare, writes=HotTable.writes - {"stages"})


def fit(trace: Trace) -> HotTable:
    """The hot table of a trace: who is used by most of its tokens."""
    ids, experts = trace.array("token.ids"), trace.header.experts
    counts = [
        np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])
    ]
    return HotTable(counts=tuple(tuple(c.tolist()) for c in counts))
