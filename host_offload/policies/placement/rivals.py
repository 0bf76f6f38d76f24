"""Who else decides where misses are computed: the arms that PreScope is compared with.

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
    greedy_split,
    presched,
)

FIDDLER_CPU, FIDDLER_LOAD = 7, 70
"""What a token on the CPU and a load cost in Fiddler's public code (`latency_cpu` and `latency_gpu`
in src/fiddler/mixtral.py of efeslab/fiddler, commit f2c111c2)."""

LLAMA_UPLOADS = 4
"""Most loads a layer of the arm that is capped; a setting of ours."""

KLOTSKI_HOT = 2
"""Experts that Klotski's public code prefetches for a layer: its model's top-k
(`get_prefetch_expert_index` in research/SYSU/Klotski/mixtral/mixtral.py of mindspore-lab/models,
37c216b5)."""


def greedy(seen: LayerWork) -> LayerPlan:
    """Layer by layer: equation (2), and the link full of whom the next layer is predicted to need,
    the heaviest first, until that layer is routed (section 3.3)."""
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
    """Fiddler's public code: of all configurations the one whose sum of costs is least, 7 a token
    on the CPU against 70 a load, so each expert by itself (its comment says the larger of both
    sums). Of equal ones the load."""
    first = sum(FIDDLER_CPU * work.tokens < FIDDLER_LOAD for work in seen.current)
    return LayerPlan(seen.current[:first], seen.current[first:])


def capped(seen: LayerWork, *, uploads: int = LLAMA_UPLOADS) -> LayerPlan:
    """A cap on the loads of a layer, the heaviest, the rest on the CPU: llama.cpp's way as the
    issue describes it."""
    first = max(len(seen.current) - uploads, 0)
    return LayerPlan(seen.current[:first], seen.current[first:])


def fate(seen: LayerWork) -> LayerPlan:
    """Fate: everybody is loaded, and after them whom the next layer is predicted to need."""
    return LayerPlan((), seen.current, _heaviest(seen))


def unpredicted(seen: LayerWork) -> LayerPlan:
    """PreSched that knows nothing of the layers to come: equation (2), and nothing ahead."""
    return presched(seen._replace(ahead=()))


def hybrimoe_code(seen: LayerWork) -> LayerPlan:
    """HybriMoE's public code (`HSS` in ktransformers/operators/experts.py of
    PKU-SEC-Lab/HybriMoE, 508a85b9), for a layer of a decode step.

    One queue, residents before misses, each the heaviest first. The accelerator takes its head, the
    CPU its tail, whoever would be done earlier with it, so the CPU may compute residents too. A
    load takes its time beside what the accelerator has to do already; the CPU's start counts once a
    layer. α is not looked at. What comes ahead begins behind the loads.
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
    """Klotski (Fang et al., ASPLOS 2025, as PreScope describes it and in its public code):
    everybody is loaded, the heaviest first, and serves the rows of all interleaved batches; during
    the next layer's attention come the `hot` experts that it is predicted to need most. Who
    interleaves the batches is the caller."""
    return LayerPlan((), seen.current[::-1], _heaviest(seen)[:hot], after_experts=True)


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
    "no-prediction": unpredicted,
}
"""Name → arm."""

AHEAD = frozenset({"prescope", "greedy", "hybrimoe", "fate", "klotski"})
"""Those of SCHEDULERS that prefetch, given predictions."""

AFTER_EXPERTS = frozenset({"hybrimoe", "klotski"})
"""Those whose prefetches wait until the layer's experts are computed."""


def _heaviest(seen: LayerWork) -> Queue:
    """The next layer's work, as far as it is predicted."""
    return seen.ahead[0][::-1] if seen.ahead else ()
