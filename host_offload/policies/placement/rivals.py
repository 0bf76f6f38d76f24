"""Other rules for where misses are computed: the arms that PreScope is compared with.

Each is a Scheduler (presched.py). Sources: docs/explanation/prescope.md.
"""

from __future__ import annotations

import functools
from collections import deque

from host_offload.policies.placement.presched import (
    LayerPlan,
    LayerWork,
    Queue,
    Scheduler,
    accelerator_seconds,
    greedy_split,
    presched,
)

FIDDLER_CPU, FIDDLER_LOAD = 7, 70
"""Costs of a token on the CPU and of a load in Fiddler's public code (`latency_cpu` and
`latency_gpu` in src/fiddler/mixtral.py of efeslab/fiddler, commit f2c111c2)."""

LLAMA_UPLOADS = 4
"""Most loads a layer of the capped arm; our setting."""

KLOTSKI_HOT = 2
"""Experts that Klotski's public code prefetches for a layer: its model's top-k
(`get_prefetch_expert_index` in research/SYSU/Klotski/mixtral/mixtral.py of mindspore-lab/models,
37c216b5)."""


def greedy(seen: LayerWork) -> LayerPlan:
    """Layer by layer: equation (2), then prefetches of the next layer's predicted experts, the
    heaviest first, until that layer is routed (section 3.3)."""
    first = greedy_split(seen.current, seen.costs, seen.alpha)
    return LayerPlan(seen.current[:first], seen.current[first:], _heaviest(seen))


def hybrimoe(seen: LayerWork) -> LayerPlan:
    """HybriMoE as PreScope describes it (sections 2.2, 6.1): the greedy split of a queue by tokens,
    and prefetches during non-expert computation."""
    return greedy(seen)._replace(after_experts=True)


def fiddler(seen: LayerWork) -> LayerPlan:
    """Fiddler as PreScope describes it: misses are computed on the CPU, nothing is loaded."""
    return LayerPlan(seen.current, ())


def fiddler_code(seen: LayerWork) -> LayerPlan:
    """Fiddler's public code: the configuration with the least sum of costs, 7 for a token on the
    CPU and 70 for a load, so each expert is decided by itself (its comment says the larger of both
    sums). Of equal costs the load is taken."""
    first = sum(FIDDLER_CPU * work.tokens < FIDDLER_LOAD for work in seen.current)
    return LayerPlan(seen.current[:first], seen.current[first:])


def capped(seen: LayerWork, *, uploads: int = LLAMA_UPLOADS) -> LayerPlan:
    """Loads the heaviest experts of a layer, at most `uploads`, and computes the rest on the CPU:
    llama.cpp's way, as its issue describes it."""
    first = max(len(seen.current) - uploads, 0)
    return LayerPlan(seen.current[:first], seen.current[first:])


def fate(seen: LayerWork) -> LayerPlan:
    """Fate: all experts are loaded, then the predicted experts of the next layer."""
    return LayerPlan((), seen.current, _heaviest(seen))


def unpredicted(seen: LayerWork) -> LayerPlan:
    """PreSched without predictions: equation (2), and no prefetch."""
    return presched(seen._replace(ahead=()))


def hybrimoe_code(seen: LayerWork) -> LayerPlan:
    """HybriMoE's public code (`HSS` in ktransformers/operators/experts.py of
    PKU-SEC-Lab/HybriMoE, 508a85b9), for a layer of a decode step.

    There is one queue, residents before misses, the heaviest first in each. The accelerator takes
    the head and the CPU the tail, whichever would be done earlier, so the CPU may also compute
    residents. A load runs beside the accelerator's earlier work; the CPU's startup counts once a
    layer. α is ignored. Prefetches begin after the loads.
    """
    costs = seen.costs
    waiting = deque((*seen.resident[::-1], *seen.current[::-1]))
    missing = {*seen.current}
    accelerator = cpu = moved = 0.0
    on_cpu, load = [], []
    while waiting:
        first, last = waiting[0], waiting[-1]
        begins = max(accelerator, moved + costs.load) if first in missing else accelerator
        ends = costs.per_token * last.tokens + (0.0 if on_cpu else costs.startup)
        if begins + costs.accelerator <= cpu + ends:
            waiting.popleft()
            accelerator = begins + costs.accelerator
            if first in missing:
                moved += costs.load
                load.append(first)
        else:
            waiting.pop()
            cpu += ends
            on_cpu.append(last)
    return LayerPlan(tuple(on_cpu), tuple(load), _heaviest(seen))


def klotski(seen: LayerWork, *, hot: int = KLOTSKI_HOT) -> LayerPlan:
    """Klotski (Fang et al., ASPLOS 2025, as PreScope describes it and in its public code): all
    experts are loaded, the heaviest first, and each serves the rows of all interleaved batches.
    During the next layer's attention its `hot` most likely experts are prefetched. The caller
    interleaves the batches."""
    return LayerPlan((), seen.current[::-1], _heaviest(seen)[:hot], after_experts=True)


def dali(seen: LayerWork) -> LayerPlan:
    """DALI's greedy 0-1 assignment (Zhu et al., arXiv:2602.03495, of which we had the abstract):
    each expert, the heaviest first, goes to the processor that is then done earlier; of equal
    times to the accelerator, which also computes the residents. DALI's prefetch and its cache are
    not here."""
    costs, on_cpu, load = seen.costs, [], []
    for work in seen.current[::-1]:
        loads = len(load) + 1
        accelerator = max(
            accelerator_seconds(loads, costs, seen.alpha),
            (len(seen.resident) + loads) * costs.accelerator,
        )
        faster = accelerator <= costs.on_cpu((*on_cpu, work))
        (load if faster else on_cpu).append(work)
    return LayerPlan(tuple(on_cpu[::-1]), tuple(load))


SCHEDULERS: dict[str, Scheduler] = {
    "prescope": presched,
    "greedy": greedy,
    "hybrimoe": hybrimoe,
    "hybrimoe-code": hybrimoe_code,
    "fiddler": fiddler,
    "fiddler-code": fiddler_code,
    "llama.cpp": functools.partial(capped, uploads=LLAMA_UPLOADS),
    "fate": fate,
    "klotski": klotski,
    "dali": dali,
    # Misses stay on the CPU; PlacementPolicy.defer is what it adds.
    "ktransformers": fiddler,
    "no-prediction": unpredicted,
}
"""Name → arm."""

AHEAD = frozenset({"prescope", "greedy", "hybrimoe", "fate", "klotski"})
"""The SCHEDULERS that prefetch if there are predictions."""

AFTER_EXPERTS = frozenset({"hybrimoe", "klotski"})
"""The SCHEDULERS whose prefetches wait until the layer's experts are computed."""


def _heaviest(seen: LayerWork) -> Queue:
    """The next layer's predicted work, the heaviest first."""
    return seen.ahead[0][::-1] if seen.ahead else ()
