"""Two processors and a link, by events: what a step takes under a placement of missed experts.

The accelerator, the CPU beside the weights and the link each do one thing at a time. Transfers go
through the buffers of PreScope's AsyncIO, so a load may wait for one. No clock is read and nothing
is random: equal arguments, equal times. What the equations of PreSched say of the same plans is in
host_offload/policies/placement/presched.py; docs/prescope.md compares both.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from host_offload.policies.placement.buffers import PARTS, Buffers, Key
from host_offload.policies.placement.presched import (
    LayerPlan,
    PlacementCosts,
    Scheduler,
    Work,
    followed,
    queue_of,
)

DISTANCE = 2
"""Layers ahead that are predicted, the second one for Q4."""

BLOCKING_LOAD = 1.7
"""How much longer a load takes that is no asynchronous one (section 6.3: over 70% slower)."""


class LayerTimes(NamedTuple):
    """What happened between a layer's routing and the next layer's, in seconds."""

    seconds: float
    alpha: float
    """How long the link was still busy with an earlier prefetch at this layer's routing."""
    cpu_s: float
    """When the CPU was done with its experts, from the routing on; 0 where it had none."""
    accelerator_s: float
    """The same of the accelerator."""
    link_s: float
    """How long the link was busy."""
    plan: LayerPlan
    begun: int
    """Prefetches of the plan that were begun."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the simulation is told beside the work."""

    scheduler: Scheduler
    costs: PlacementCosts
    group: int
    """Buffers of each of the two prefetch groups."""
    hit: float = 1.0
    """R_hit at the start; it follows what critical prefetches turn out to be."""
    asynchronous: bool = True
    """False: nobody computes while an expert is loaded, nothing comes ahead, and a load takes
    BLOCKING_LOAD times as long."""


def simulate_placement(
    tokens: np.ndarray, predicted: np.ndarray, resident: np.ndarray, setting: Setting
) -> list[list[LayerTimes]]:
    """The times of each layer of each step.

    tokens: int[T, L, E] rows of each expert in each step. predicted: int[T, L, d, E] what is
    expected at layer l's routing of the layers l + 1 … l + d (d ≤ DISTANCE; entries of layers that
    do not exist are not read). resident: bool[L, E] (hot_table). A step begins with nobody else on
    the accelerator and the link free; R_hit goes on over steps.
    """
    hit, found = setting.hit, []
    for counts, ahead in zip(tokens, predicted, strict=True):
        step = _Step(counts, ahead, resident, setting, hit)
        found.append(step.run())
        hit = step.hit
    return found


class _Step:
    """One step's events. Times are seconds from its first layer's routing."""

    def __init__(
        self,
        tokens: np.ndarray,
        predicted: np.ndarray,
        resident: np.ndarray,
        setting: Setting,
        hit: float,
    ):
        self.tokens, self.predicted, self.resident = tokens, predicted, resident
        self.setting, self.hit = setting, hit
        costs = setting.costs
        self.load_s = costs.load * (1.0 if setting.asynchronous else BLOCKING_LOAD)
        self.events: list[tuple[float, int, str, Key]] = []
        self.order = itertools.count()
        self.now = 0.0
        self.buffers = Buffers.empty(setting.group)
        self.flying: tuple[Key, float] | None = None
        self.loads: deque[Work] = deque()
        self.prefetches: deque[Work] = deque()
        self.may_prefetch = True
        self.critical: set[Key] = set()
        self.cpu: deque[Work] = deque()
        self.accelerator: deque[Key] = deque()
        """Experts of this layer that are there and not computed yet."""
        self.awaited: set[Key] = set()
        """Experts of this layer that the accelerator is to compute once they land."""
        self.cpu_busy = self.accelerator_busy = False
        self.cpu_end = self.accelerator_end = self.link_s = 0.0
        self.begun = 0

    def run(self) -> list[LayerTimes]:
        return [self._layer(layer) for layer in range(len(self.tokens))]

    # ---- a layer

    def _layer(self, layer: int) -> LayerTimes:
        began = self.now
        alpha = max(self.flying[1] - began, 0.0) if self.flying else 0.0
        plan = self._routed(layer, alpha)
        self.link_s, self.begun = alpha, 0
        self.cpu_end = self.accelerator_end = began
        self.may_prefetch = not plan.after_experts
        self._go_on()
        while self._at_work:
            self._next_event()
        self.buffers = self.buffers.layer_ended(layer)
        self.may_prefetch = True
        self._go_on()
        routing = self.now + self.setting.costs.attention
        while self.events and self.events[0][0] <= routing:
            self._next_event()
        self.now = routing
        self.prefetches.clear()  # Premise 3: who has not begun does not begin any more
        link_s = self.link_s - max(self.flying[1] - routing, 0.0) if self.flying else self.link_s
        return LayerTimes(
            routing - began,
            alpha,
            self.cpu_end - began,
            self.accelerator_end - began,
            link_s,
            plan,
            self.begun,
        )

    def _routed(self, layer: int, alpha: float) -> LayerPlan:
        """The plan at a layer's routing, and everybody's work."""
        setting, counts = self.setting, self.tokens[layer]
        held = {b.key: b for b in self.buffers.all if b.key is not None}
        for key in sorted(key for key in self.critical if key[0] == layer):
            self.hit = followed(self.hit, bool(counts[key[1]]))
        ahead = [
            queue_of(layer + d, self.predicted[layer, d - 1], self._there(layer + d))
            for d in range(1, 1 + self.predicted.shape[1])
            if layer + d < len(self.tokens)
        ]
        current = queue_of(layer, counts, self._there(layer))
        plan = setting.scheduler(current, ahead, setting.costs, alpha, self.hit)
        self.loads.extend(plan.load)
        self.prefetches.extend(plan.prefetch if setting.asynchronous else ())
        self.cpu.extend(plan.cpu)
        used = [(layer, int(e)) for e in np.flatnonzero((counts > 0) & self._there(layer))]
        self.accelerator.extend(key for key in used if key not in held or not held[key].missing)
        self.awaited = {(w.layer, w.expert) for w in plan.load}
        self.awaited |= {key for key in used if key in held and held[key].missing}
        return plan

    def _there(self, layer: int) -> np.ndarray:
        """bool[E]: resident, prefetched or on its way."""
        there = self.resident[layer].copy()
        there[[b.key[1] for b in self.buffers.all if b.key and b.key[0] == layer]] = True
        return there

    # ---- processors and link

    @property
    def _at_work(self) -> bool:
        """Experts of the layer are left to compute."""
        waiting = self.cpu or self.accelerator or self.awaited
        return bool(waiting) or self.cpu_busy or self.accelerator_busy

    def _go_on(self) -> None:
        """Whoever is free begins what is next."""
        self._link()
        if not self.setting.asynchronous and self.flying:
            return
        if self.cpu and not self.cpu_busy:
            work, self.cpu_busy = self.cpu.popleft(), True
            self._after(self.setting.costs.on_cpu((work,)), "cpu", (work.layer, work.expert))
        if self.accelerator and not self.accelerator_busy:
            key, self.accelerator_busy = self.accelerator.popleft(), True
            if self.buffers.place(key) is not None:
                self.buffers = self.buffers.read_begun(key)
            self._after(self.setting.costs.accelerator, "accelerator", key)

    def _link(self) -> None:
        queue = self.loads or (self.prefetches if self.may_prefetch else None)
        if self.flying or not queue:
            return
        computing = self.cpu_busy or self.accelerator_busy or self.accelerator
        if not self.setting.asynchronous and computing:
            return
        key, ahead = (queue[0].layer, queue[0].expert), queue is self.prefetches
        buffers = self.buffers.begun(key, ahead=ahead)
        if buffers is None:
            return
        queue.popleft()
        self.buffers, self.flying = buffers, (key, self.now + self.load_s)
        self.link_s += self.load_s
        self._after(self.load_s, "landed", key)
        if ahead:
            self.begun += 1
            if not queue:
                self.critical.add(key)

    def _after(self, seconds: float, what: str, key: Key) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, key))

    def _next_event(self) -> None:
        self.now, _, what, key = heapq.heappop(self.events)
        if what == "cpu":
            self.cpu_busy, self.cpu_end = False, self.now
        elif what == "accelerator":
            self.accelerator_busy, self.accelerator_end = False, self.now
            if self.buffers.place(key) is not None:
                self.buffers = self.buffers.read_ended(key)
        else:
            self.flying = None
            for part in sorted(PARTS):  # three streams that share the link's bytes evenly
                self.buffers = self.buffers.landed(key, part)
            if key in self.awaited:
                self.awaited.remove(key)
                self.accelerator.append(key)
        self._go_on()


def right_predictions(tokens: np.ndarray, distance: int = DISTANCE) -> np.ndarray:
    """int[T, L, distance, E]: predictions that are all right, of tokens int[T, L, E]; zeros for
    layers that do not exist."""
    steps, layers, experts = tokens.shape
    found = np.zeros((steps, layers, distance, experts), tokens.dtype)
    for d in range(1, distance + 1):
        found[:, : layers - d, d - 1] = tokens[:, d:]
    return found
