"""Who else decides where misses are computed: the arms that PreScope is compared with.

Each is a Scheduler (presched.py). What they predict by, and whether transfers run beside compute,
is the simulation's to say (host_offload/simulate/placement.py). Sources: docs/prescope.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from host_offload.policies.placement.presched import (
    LayerPlan,
    PlacementCosts,
    Queue,
    Scheduler,
    greedy_split,
    presched,
)

FIDDLER_CPU, FIDDLER_LOAD = 7, 70
"""What a token on the CPU and a load cost in Fiddler's public code (`latency_cpu` and `latency_gpu`
in src/fiddler/mixtral.py of efeslab/fiddler, commit f2c111c2)."""

LLAMA_UPLOADS = 4
"""Most loads a layer of the arm that is capped; a setting of ours."""


def greedy(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """Layer by layer: equation (2), and the link full of whom the next layer is predicted to need,
    the heaviest first, until that layer is routed (section 3.3)."""
    first = greedy_split(current, costs, alpha)
    return LayerPlan(current[:first], current[first:], _heaviest(ahead))


def hybrimoe(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """HybriMoE as PreScope describes it (sections 2.2, 6.1): the greedy split of a queue by tokens,
    and prefetches during non-expert computation."""
    return greedy(current, ahead, costs, alpha, hit)._replace(after_experts=True)


def fiddler(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """Fiddler as PreScope describes it: misses are computed on the CPU, nothing is loaded."""
    return LayerPlan(current, ())


def fiddler_code(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """Fiddler's public code: of all configurations the one whose sum of costs is least, 7 a token
    on the CPU against 70 a load, so each expert by itself (its comment says the larger of both
    sums). Of equal ones the load."""
    first = sum(FIDDLER_CPU * work.tokens < FIDDLER_LOAD for work in current)
    return LayerPlan(current[:first], current[first:])


def capped(
    current: Queue,
    ahead: Sequence[Queue],
    costs: PlacementCosts,
    alpha: float,
    hit: float,
    *,
    uploads: int = LLAMA_UPLOADS,
) -> LayerPlan:
    """A cap on the loads of a layer, the heaviest, the rest on the CPU: llama.cpp's way as the
    issue describes it."""
    first = max(len(current) - uploads, 0)
    return LayerPlan(current[:first], current[first:])


def fate(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """Fate: everybody is loaded, and after them whom the next layer is predicted to need."""
    return LayerPlan((), current, _heaviest(ahead))


def unpredicted(
    current: Queue, ahead: Sequence[Queue], costs: PlacementCosts, alpha: float, hit: float
) -> LayerPlan:
    """PreSched that knows nothing of the layers to come: equation (2), and nothing ahead."""
    return presched(current, (), costs, alpha, hit)


SCHEDULERS: dict[str, Scheduler] = {
    "prescope": presched,
    "greedy": greedy,
    "hybrimoe": hybrimoe,
    "fiddler": fiddler,
    "fiddler-code": fiddler_code,
    "llama.cpp": functools.partial(capped, uploads=LLAMA_UPLOADS),
    "fate": fate,
    "no-prediction": unpredicted,
}
"""Name → arm."""


def _heaviest(ahead: Sequence[Queue]) -> Queue:
    return ahead[0][::-1] if ahead else ()
