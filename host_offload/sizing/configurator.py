"""The offline configurator: a trace of turns in, one split of the memory out (WiSP, equation 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.control.kv_references import KVReferences
from host_offload.sizing.cell_allocation import allocate, hull_misses
from host_offload.sizing.miss_curves import PageRecency, cold_curves, page_references
from host_offload.sizing.split import Division, MissCosts, SplitError, SplitRule
from host_offload.traces.reader import Trace
from host_offload.traces.recency import tails
from host_offload.traces.schema import TraceError
from host_offload.traces.step_sets import in_waves, step_set


class Turn(NamedTuple):
    """The references between the end of one turn and the end of the next."""

    active: Sequence[np.ndarray]
    """bool[L, E] each: the references in order, waves one by one."""
    pages: np.ndarray
    """int64[R, 2]: (session, page) of the turn that ended, each once; see kv_references."""


def turns_of(trace: Trace) -> Iterator[Turn]:
    """The turns of a trace in order; what comes after the last turn's end is one without pages.

    Raises TraceError for a trace that does not say its page_tokens or whose tokens are which
    request's, and as read_step_sets does.
    """
    header = trace.header
    if lacking := {"token.request", "token.position"} & {*header.absent}:
        raise TraceError(
            f"{trace.directory} has no {' and '.join(sorted(lacking))}, so its turns are not known;"
            " record one with --trace"
        )
    if "page_tokens" not in header.spec:
        raise TraceError(f"the spec of {trace.directory} does not say page_tokens")
    references = KVReferences(int(header.spec["page_tokens"]))
    active: list[np.ndarray] = []
    for step in trace.step_traces():
        found, waves = step_set(step, header.experts)
        active += in_waves(found, waves)
        references.see(step.request, step.user, step.position)
        for request in step.finished:
            yield Turn(active, references.end(request))
            active = []
    if active:
        yield Turn(active, np.zeros((0, 2), np.int64))


class Streams(NamedTuple):
    """Histograms of finite distances, what Algorithm 2 keeps of both streams."""

    experts: np.ndarray
    """float64[L, E]"""
    pages: np.ndarray
    """float64[P + 1], P the largest pool; the last entry has all distances from P on."""

    @property
    def expert_misses(self) -> np.ndarray:
        """float64[L, E + 1]: warm misses of each layer."""
        return tails(self.experts)

    @property
    def kv_misses(self) -> np.ndarray:
        """float64[P + 1]: warm misses of a pool of so many pages; the last column has what comes
        back but no pool can keep."""
        return tails(self.pages)[:-1]

    def then(self, later: Streams, decay: float = 1.0) -> Streams:
        """The sum of both, this one decayed."""
        return Streams(decay * self.experts + later.experts, decay * self.pages + later.pages)


def cap_misses(expert_misses: np.ndarray, allocation: str = "uniform") -> np.ndarray:
    """float64[E + 1]: M_E by cap of curves [L, E + 1], with cap·L slots shared by the allocation
    (`marginal` by the hulls)."""
    if allocation == "uniform":
        return expert_misses.sum(axis=0)
    layers, columns = expert_misses.shape
    return hull_misses(expert_misses, np.arange(columns) * layers)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A split to start with."""

    cap: int
    """C* = ⌊B_E*/b_e⌋"""
    cells: np.ndarray
    """int64[L]; cap·L in all."""
    kv_pages: int
    expert_misses: float
    """Predicted for the whole trace, first sights left out, as for KV; exact where the cells hold
    the largest set, see miss_curves."""
    kv_misses: float
    seconds: float
    """J at the cap: what these misses cost."""


def configure(
    turns: Iterable[Turn], division: Division, costs: MissCosts, *, allocation: str = "uniform"
) -> Configuration:
    """Runs Algorithm 2 open-loop on all turns, with nothing forgotten, until it rests.

    allocation: one of cell_allocation.ALLOCATIONS. Raises SplitError without turns, or where none
    has a reference.
    """
    whole = None
    for found in histograms_of(turns, int(division.pages[0])):
        whole = whole.then(found) if whole else found
    if whole is None:
        raise SplitError("there is no turn to configure from")
    curves, kv = whole.expert_misses, whole.kv_misses
    rule, experts, before, split = SplitRule(), cap_misses(curves, allocation), None, 0.5
    while split != before:  # towards the nearest of the best, so it ends
        before = split
        split = rule.next_split(split, division, experts, kv, costs)
    cap = division.cap_at(split)
    cells, pages = allocate(allocation, curves, cap * len(curves)), division.pages_at(cap)
    missed = float(kv[pages])
    return Configuration(
        cap=cap,
        cells=cells.cells,
        kv_pages=pages,
        expert_misses=cells.misses,
        kv_misses=missed,
        seconds=costs.expert_s * cells.misses + costs.page_s * missed,
    )


def histograms_of(turns: Iterable[Turn], pages: int) -> Iterator[Streams]:
    """Each turn's histograms, from a cold start. pages: the largest pool."""
    curves, held = None, PageRecency()
    for turn in turns:
        held, distances = page_references(held, turn.pages)
        if curves is None:
            if not turn.active:
                continue
            curves = cold_curves(*turn.active[0].shape)
        for active in turn.active:
            curves = curves.reference(active)
        curves = curves.forget(0)
        kv = np.bincount(np.minimum(distances, pages), minlength=pages + 1)
        yield Streams(curves.histogram, kv.astype(np.float64))
