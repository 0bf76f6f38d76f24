"""The offline configurator: turns a trace into one split of the memory (WiSP, equation 7)."""

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
    """bool[L, E] each: the references in order, one for each wave."""
    pages: np.ndarray
    """int64[R, 2]: (session, page) of the turn that ended, each once; see kv_references."""


def turns_of(trace: Trace) -> Iterator[Turn]:
    """Yields the turns of a trace in order. What comes after the last turn's end is a turn without
    pages.

    Raises TraceError for a trace without page_tokens or without the request of each token, and like
    read_step_sets.
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
    """Histograms of finite distances that Algorithm 2 keeps of both streams."""

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
        """float64[P + 1]: warm misses of a pool of each number of pages. The last column has pages
        that come back but that no pool can keep."""
        return tails(self.pages)[:-1]

    def then(self, later: Streams, decay: float = 1.0) -> Streams:
        """Returns the sum of both, after decaying this one."""
        return Streams(decay * self.experts + later.experts, decay * self.pages + later.pages)


def cap_misses(expert_misses: np.ndarray, allocation: str = "uniform") -> np.ndarray:
    """Returns M_E by cap, float64[E + 1], of curves [L, E + 1], with cap·L slots shared by the
    allocation (`marginal` by the hulls)."""
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
    """Misses predicted for the whole trace, first uses left out, as for KV. They are exact if the
    cells hold the largest set, see miss_curves."""
    kv_misses: float
    seconds: float
    """Seconds that these misses cost: J at the cap."""


def configure(
    turns: Iterable[Turn], division: Division, costs: MissCosts, *, allocation: str = "uniform"
) -> Configuration:
    """Runs Algorithm 2 open-loop on all turns, with nothing forgotten, until the split no longer
    changes.

    - `allocation`: one of cell_allocation.ALLOCATIONS.

    Raises SplitError without turns, or if none has a reference.
    """
    whole = None
    for found in histograms_of(turns, int(division.pages[0])):
        whole = whole.then(found) if whole else found
    if whole is None:
        raise SplitError("there is no turn to configure from")
    curves, kv = whole.expert_misses, whole.kv_misses
    rule, experts, before, split = SplitRule(), cap_misses(curves, allocation), None, 0.5
    while split != before:  # moves towards the nearest optimum, so it ends
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
    """Yields each turn's histograms, from a cold start.

    - `pages`: the largest pool.
    """
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
