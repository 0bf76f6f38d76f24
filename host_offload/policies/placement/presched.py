"""PreSched: which experts are loaded, which are computed on the CPU, and which are prefetched.

The prefetch-aware cross-layer scheduler of PreScope (section 4.3), as pure functions of lists of
work, costs, the delay α and the hit rate of critical prefetches. Nothing here knows a device. Where
the paper leaves a choice, docs/explanation/prescope.md says which was taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.control.step_record import LinkUse


class Work(NamedTuple):
    """Rows that one expert has to compute, if it is neither resident nor in flight."""

    tokens: int
    layer: int
    expert: int


Queue = tuple[Work, ...]
"""Work of one layer, ascending by tokens (Premise 1): the paper's E_cur and E_next."""


@dataclasses.dataclass(frozen=True)
class PlacementCosts:
    """Times of a layer's parts, in seconds (the paper's Timer)."""

    per_token: float
    """β: one row of an expert on the CPU."""
    startup: float
    """C: fixed time of an expert on the CPU, beside its rows."""
    load: float
    """t_io: an expert over the link, at the queue depth that is used."""
    accelerator: float
    """t_g: an expert on the accelerator."""
    attention: float
    """t_attn: from the end of a layer's experts to the end of the next layer's router."""

    def on_cpu(self, works: Sequence[Work]) -> float:
        """t_c of a list, equation (3) summed: β·m + C for each expert."""
        return self.per_token * sum(w.tokens for w in works) + self.startup * len(works)

    def of_size(self, share: float) -> PlacementCosts:
        """The costs of experts of so many times the bytes: the link and the CPU move them in as
        many times the time. A row more takes the same."""
        return dataclasses.replace(self, load=self.load * share, startup=self.startup * share)

    def follow(self, before: LinkUse, now: LinkUse, weight: float = 0.1) -> PlacementCosts:
        """The costs after the link and the second processor did more: t_io follows the link's time
        for each arrival, β and C the second processor's time over what they predict. Both are
        exponential averages (ours)."""
        arrived, _, busy, experts, rows, took = (
            b - a for a, b in zip(before[2:], now[2:], strict=True)
        )
        load, ratio = self.load, 1.0
        if arrived > 0:
            load += weight * (busy * 1e-6 / arrived - load)
        if (predicted := self.per_token * rows + self.startup * experts) > 0:
            ratio += weight * (took * 1e-6 / predicted - 1)
        return dataclasses.replace(
            self, load=load, per_token=self.per_token * ratio, startup=self.startup * ratio
        )


class LayerPlan(NamedTuple):
    """What happens to one layer's misses, and the use of the link after them."""

    cpu: Queue
    """Computed where their weights are, in this order."""
    load: Queue
    """Loaded on demand, in this order."""
    prefetch: Queue = ()
    """Prefetched afterwards, in this order; the last one is the critical one."""
    distance: int = 1
    """How many layers ahead the prefetches are for."""
    after_experts: bool = False
    """Whether prefetches begin only when the layer's experts are computed, as in HybriMoE."""


class LayerWork(NamedTuple):
    """The input of a scheduler at a layer's routing."""

    current: Queue
    """The layer's work."""
    ahead: Sequence[Queue]
    """The predicted work of later layers, the next one first; empty for the last layer."""
    costs: PlacementCosts
    alpha: float
    """α: seconds until the link has finished the prefetch that it has begun."""
    hit: float
    """R_hit, 0…1."""
    resident: Queue = ()
    """The work of the layer's residents."""


Scheduler = Callable[[LayerWork], LayerPlan]


def queue_of(layer: int, tokens: np.ndarray, there: np.ndarray) -> Queue:
    """The work of a layer. Of equal experts the lower id comes first.

    - `tokens`: int[E], rows of each expert.
    - `there`: bool[E], whether an expert is resident or in flight.
    """
    (missing,) = np.nonzero((tokens > 0) & ~there)
    return tuple(sorted(Work(int(tokens[e]), layer, int(e)) for e in missing))


def merge_queues(current: Queue, ahead: Queue) -> Queue:
    """E_all: both queues in ascending order. Of equal experts those of the current layer count as
    heavier, since they are needed first."""
    here = current[0].layer if current else None
    return tuple(sorted((*current, *ahead), key=lambda w: (w.tokens, w.layer == here, w)))


def accelerator_queue(every: Queue, costs: PlacementCosts, alpha: float) -> int:
    """Q1, equation (4): the first index of E_all from which on all experts belong on the
    accelerator; len(every) if none does. every[i] is in both costs, as printed."""
    cpu = costs.attention
    for i, work in enumerate(every):
        cpu += costs.on_cpu((work,))
        if alpha + (len(every) - i) * costs.load + costs.accelerator < cpu:
            return i
    return len(every)


def on_demand(current: Queue, wanted: Queue, costs: PlacementCosts, alpha: float) -> int:
    """Q1, equation (5): the first index of E_cur among `wanted` (GPU_Q) from which on all experts
    are loaded, because loading them takes less time than computing those before. len(current) if
    none is: the printed initial value would load an expert that does not qualify."""
    there = set(wanted)
    cpu = 0.0
    for i, work in enumerate(current):
        loads = alpha + (len(current) - i) * costs.load + costs.accelerator
        if work in there and loads < cpu:
            return i
        cpu += costs.on_cpu((work,))
    return len(current)


def count_overlapped(current: Queue, first: int, costs: PlacementCosts, alpha: float) -> float:
    """Q2, equation (6): f, how many prefetches fit between the last on-demand load and the next
    layer's routing, if E_cur is loaded from index `first` on. Negative: not even the loads fit."""
    gap = costs.on_cpu(current[:first]) - alpha - (len(current) - first) * costs.load
    return (gap + costs.attention) / costs.load


def benefit(f: float, count: int, hit: float) -> float:
    """Q3, equation (7): ξ of the critical prefetch, in loads, if `count` prefetches are issued. hit
    is R_hit; R_miss is 1 − R_hit."""
    return hit * (f - count + 1) - (1 - hit) * (count - f)


def prefetches(f: float, most: int, hit: float) -> int:
    """Q2 and Q3: how many of `most` candidates are prefetched: F, the nearest integer to f, if the
    critical prefetch pays, otherwise one fewer."""
    count = min(max(math.floor(f + 0.5), 0), most)
    return count if count == 0 or benefit(f, count, hit) > 0 else count - 1


def accelerator_seconds(loads: int, costs: PlacementCosts, alpha: float) -> float:
    """T_G of a layer: seconds from its routing until the accelerator has computed `loads` experts.
    These arrive one after the other once the link is free, in `alpha` seconds. With t_g below t_io
    it is the paper's α + loads·t_io + t_g (Premise 5); otherwise experts wait for the
    accelerator."""
    if not loads:
        return 0.0
    waiting = alpha + costs.load + loads * costs.accelerator
    return max(waiting, alpha + loads * costs.load + costs.accelerator)


def greedy_split(current: Queue, costs: PlacementCosts, alpha: float) -> int:
    """Equation (2): the index from which on all experts are loaded, so that the slower processor is
    done as early as possible; of equal choices the one with the fewest loads."""

    def slower(first: int) -> float:
        accelerator = accelerator_seconds(len(current) - first, costs, alpha)
        return max(costs.on_cpu(current[:first]), accelerator)

    return min(range(len(current), -1, -1), key=slower)


def presched(seen: LayerWork) -> LayerPlan:
    """Algorithm 1 for one layer.

    The last layer has no later work to weigh against, so equation (2) decides there (ours). If the
    next layer wants no expert on the accelerator (Q4), the rule is applied to the layer after it,
    as far as `ahead` goes. Residents are not considered (Premise 5).
    """
    current, ahead, costs, alpha, hit, _ = seen
    if not ahead:
        first = greedy_split(current, costs, alpha)
        return LayerPlan(current[:first], current[first:])
    every = merge_queues(current, ahead[0])
    first = on_demand(current, every[accelerator_queue(every, costs, alpha) :], costs, alpha)
    f = count_overlapped(current, first, costs, alpha)
    for distance, works in enumerate(ahead, 1):
        every = merge_queues(current, works)
        wanted = every[accelerator_queue(every, costs, alpha) :]
        if set(wanted) & set(works):
            count = prefetches(f, len(works), hit)
            best = works[len(works) - count :][::-1]
            return LayerPlan(current[:first], current[first:], best, distance)
    return LayerPlan(current[:first], current[first:])


def follow_hit_rate(hit: float, found: bool, weight: float = 0.1) -> float:
    """R_hit after one more critical prefetch, an exponential average (ours; the paper leaves it
    open).

    - `found`: whether the prefetch was used.
    """
    return hit + weight * (found - hit)
