"""What the timeline needs beyond sums: where in a step its seconds lie, and what computing loses
beside a queue that moves bytes. Measured with native CPU ops; elsewhere there is no queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from host_offload.simulate.timeline import TimelineEvent
from host_offload.sizing.cost_model import Shares, StepCost
from moejax.costs.forced import SLACK, WARM, Case, ForcedSteps
from moejax.traces.timeline import measured_events
from pallas_kernels.cpu.spans import recorded

RATE = 2e9
"""Bytes per second of the copy that steps are measured beside."""

COPIED = 64 << 20
"""Bytes of one of its transfers."""

ROUNDS = 5
"""Pairs of steps alone and beside it."""


def step_shares(forced: ForcedSteps, case: Case, cost: StepCost, timed: int) -> Shares:
    """Where the seconds of the case's steps lie, by what their ops recorded. case: moves nothing.
    cost: of its executable. timed: steps."""
    forced.begin(case.rows, case.prompt, WARM + timed + 1)
    with recorded() as ops:
        samples = forced.measure(case, timed)
    forced.end()
    work = samples[-1].work._replace(experts=0, tiles=0)
    layer = layer_seconds(measured_events(ops))
    return shares_of(cost, cost.seconds(work), forced.layers, *layer)


def layer_seconds(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    """Median seconds of a layer before its experts (without filling cells) and after them."""
    ordered = sorted(events, key=lambda event: event.begin)
    runs = [list(run) for _, run in itertools.groupby(ordered, key=lambda event: event.layer)]
    before, after = [], []
    for run in runs:
        if experts := [event for event in run if event.name == "expert_ffn"]:
            fills = sum(event.end - event.begin for event in run if event.name == "fill")
            before.append(experts[0].begin - run[0].begin - fills)
            after.append(run[-1].end - experts[-1].end)
    return float(np.median(before)), float(np.median(after))


def shares_of(cost: StepCost, fixed: float, layers: int, before: float, after: float) -> Shares:
    """fixed: seconds of a step that are no expert's. before, after: seconds of a layer."""
    outside = np.clip((fixed - layers * (before + after)) / cost.step, 0, 1) if cost.step else 0.0
    inside = cost.step * (1 - outside)
    return Shares(
        outside=float(outside),
        after=float(min(layers * after / inside, 1.0)) if inside else 0.0,
    )


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
