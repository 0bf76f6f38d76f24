"""Belady's eviction, a control that knows the run."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.traces.reader import Trace
from host_offload.traces.step_sets import check_future, needed_experts
from pallas_kernels.plan.victim import MAX_PRIOR

MAX_DUE = np.iinfo(np.int32).max


class Future(NamedTuple):
    """State of Belady."""

    due: np.ndarray
    """int32[T + 1, L, E]: the first step at or after each that needs the expert."""
    resident: np.ndarray
    """bool[L, E]"""


@dataclasses.dataclass(frozen=True)
class Belady:
    """MIN: after each step those experts of a layer are resident whose next use is nearest; a miss
    whose next use is further away gets no cell (L. A. Belady, IBM Systems Journal 5, 1966, with
    bypass). A step's own experts keep their cells, so with few cells it moves a little more than
    `simulate.bounds.min_transfers`.

    The future is the trace of the very run, so it is a control, like the prefetch `oracle`.
    """

    needed: np.ndarray = dataclasses.field(repr=False, compare=False)
    """bool[T, L, E]: the experts that each step needs."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN})
    needs: frozenset[str] = frozenset({"cells"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "fill_version"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)

    def init(self, spec: Spec) -> Future:
        check_future(self.needed, spec)
        return Future(next_uses(self.needed), np.zeros(self.needed.shape[1:], bool))

    def decide(self, state: Future, observation: Observation) -> tuple[Future, Decision]:
        step = min(observation.step, len(self.needed) - 1)
        due = state.due[step + 1]
        there = state.resident | self.needed[step]
        in_use = state.resident & self.needed[step]  # no step evicts what it computes with
        order = np.argsort(
            np.where(in_use, -1, np.where(there, due, MAX_DUE)), axis=1, kind="stable"
        )
        rank = np.argsort(order, axis=1)
        kept = there & (rank < observation.cells[:, None])
        prior = np.where(kept, np.maximum(MAX_PRIOR - (due - step), 1), 0)
        fill = np.where(kept, 0, -1).astype(np.int8)  # -1: read through, without a cell
        return Future(state.due, kept), Decision(prior=prior, fill_version=fill)


def next_uses(needed: np.ndarray) -> np.ndarray:
    """int32[T + 1, L, E]: the first step at or after each that needs the expert, of bool[T, L, E];
    T + MAX_PRIOR: none does."""
    steps, layers, experts = needed.shape
    never = np.full((1, layers, experts), steps + MAX_PRIOR)
    due = np.where(needed, np.arange(steps)[:, None, None], never)
    due = np.minimum.accumulate(np.concatenate([due, never])[::-1], axis=0)[::-1]
    return due.astype(np.int32)


def belady_of(trace: Trace) -> Belady:
    """Returns Belady's eviction of a run, from its trace. Raises ValueError for a trace that lacks
    steps."""
    return Belady(needed_experts(trace))
