"""What the timeline needs beyond sums: where in a step its seconds lie, and what computing loses
beside a queue that moves bytes. Measured with native CPU ops; elsewhere there is no queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from host_offload.simulate.timeline import TimelineEvent
from host_offload.sizing.cost_model import StepCost
from moejax.costs.forced import SLACK, WARM, Case, ForcedSteps
from moejax.traces.timeline import measured_events
from pallas_kernels.cpu.spans import recorded

RATE = 2e9
"""Bytes per second of the copy that steps are measured beside."""

COPIED = 64 << 20
"""Bytes of one of its transfers."""

ROUNDS = 5
"""Pairs of steps alone and beside it."""


def outside_share(forced: ForcedSteps, case: Case, cost: StepCost, timed: int) -> float:
    """The share of cost.step that lies outside of layers: what of the case's steps is neither an
    expert's nor, by what their ops recorded, a layer's. case: moves nothing. cost: of its
    executable. timed: steps."""
    forced.begin(case.rows, case.prompt, WARM + timed + 1)
    with recorded() as ops:
        samples = forced.measure(case, timed)
    forced.end()
    fixed = cost.seconds(samples[-1].work._replace(experts=0, tiles=0))
    inside = forced.layers * layer_seconds(measured_events(ops))
    return float(np.clip((fixed - inside) / cost.step, 0, 1)) if cost.step else 0.0


def layer_seconds(events: Sequence[TimelineEvent]) -> float:
    """Median seconds of a layer without its experts and filling cells."""
    ordered = sorted(events, key=lambda event: event.begin)
    found = []
    for _, group in itertools.groupby(ordered, key=lambda event: event.layer):
        run = list(group)
        experts = [e for e in run if e.name in ("expert_ffn", "fill")]
        if any(event.name == "expert_ffn" for event in experts):
            spent = sum(event.end - event.begin for event in experts)
            found.append(run[-1].end - run[0].begin - spent)
    return float(np.median(found))


def beside_per_byte(forced: ForcedSteps, case: Case, timed: int) -> float:
    """Seconds that steps lose by each byte that a queue copies meanwhile at RATE: the median of
    pairs."""
    source, target = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    load = Load((COPIED,), Source(address=source.ctypes.data), target.ctypes.data)
    lost = []
    with NativeQueue(rate=RATE) as queue:
        for _ in range(ROUNDS):
            alone = _median_s(forced, case, timed)
            tickets = [queue.submit(Transfer(0, 0, 0, cell, "copy"), load) for cell in range(64)]
            beside = _median_s(forced, case, timed)
            begun = [ticket for ticket in tickets if not queue.cancel(ticket)]
            for ticket in begun:
                queue.wait(ticket)
            if len(begun) == len(tickets):
                raise RuntimeError("the copy ended before the steps that were measured beside it")
            queue.observe()
            lost.append((1 - alone / beside) / RATE)
    return max(float(np.median(lost)), 0.0)


def _median_s(forced: ForcedSteps, case: Case, timed: int) -> float:
    forced.begin(case.rows, case.prompt, WARM + timed + SLACK)
    seconds = [sample.seconds for sample in forced.measure(case, timed)]
    forced.end()
    return float(np.median(seconds))
