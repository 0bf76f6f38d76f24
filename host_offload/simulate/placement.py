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
from host_offload.policies.placement.caches import Cache, Horizon
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
    cache: Cache | None = None
    """Residents that change (rivals'): who is loaded takes a place of its own, as long as somebody
    can go whom this layer does not need; else loads on demand go through the two buffers and are
    gone when they are read. None: the hot table, and all buffers."""
    horizon: Horizon | None = None
    """Layers ahead that the scheduler is told of, adjusted from layer to layer (ExpertFlow)."""


class _Carried(NamedTuple):
    """What a step leaves to the next one."""

    hit: float
    cache: Cache | None
    horizon: Horizon | None


def simulate_placement(
    tokens: np.ndarray,
    predicted: np.ndarray,
    resident: np.ndarray,
    setting: Setting,
    passes: np.ndarray | None = None,
) -> list[list[LayerTimes]]:
    """The times of each layer of each step.

    tokens: int[T, L, E] rows of each expert in each step. predicted: int[T, L, d, E] what is
    expected at layer l's routing of the layers l + 1 … l + d (entries of layers that do not exist
    are not read). resident: bool[L, E] (hot_table), without a cache. passes: int[T, L, E] how often
    the accelerator computes an expert of a step, where several batches are interleaved; None: once.
    A step begins with nobody in the buffers and the link free; R_hit, the cache and the horizon go
    on over steps.
    """
    if passes is None:
        passes = np.ones(tokens.shape, np.int64)
    carried, found = _Carried(setting.hit, setting.cache, setting.horizon), []
    for counts, ahead, times in zip(tokens, predicted, passes, strict=True):
        step = _Step(counts, ahead, resident, setting, carried, times)
        found.append(step.run())
        carried = _Carried(step.hit, step.cache, step.horizon)
    return found


def interleaved(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two batches that go through the layers together (Klotski): the first half of the steps
    beside the second half. tokens: int[T, L, E]. Returns int[T / 2, L, E] rows and how many of the
    two batches use the expert, the passes of simulate_placement. Raises ValueError for fewer than
    two steps."""
    half = len(tokens) // 2
    if not half:
        raise ValueError("two batches need two steps to be taken from")
    one, other = tokens[:half], tokens[half : 2 * half]
    return one + other, (one > 0).astype(np.int64) + (other > 0)


class _Step:
    """One step's events. Times are seconds from its first layer's routing."""

    def __init__(
        self,
        tokens: np.ndarray,
        predicted: np.ndarray,
        resident: np.ndarray,
        setting: Setting,
        carried: _Carried,
        passes: np.ndarray,
    ):
        self.tokens, self.predicted, self.resident = tokens, predicted, resident
        self.passes = passes
        self.setting = setting
        self.hit, self.cache, self.horizon = carried
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
        self.foreseen: set[Key] = set()
        """Experts of layers to come that were on a list of prefetches."""
        self.ahead: set[Key] = set()
        """Experts of layers to come whose prefetch began."""
        self.cpu: deque[Work] = deque()
        self.accelerator: deque[Key] = deque()
        """Experts of this layer that are there and not computed yet."""
        self.computed: Key | None = None
        """Whom the accelerator computes."""
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
        for key in sorted(key for key in self.critical if key[0] == layer):
            self.hit = followed(self.hit, bool(counts[key[1]]))
        self._look_back(layer)
        reach = self.predicted.shape[1] if self.horizon is None else self.horizon.steps
        predicted = self.predicted[layer, :reach]
        if self.cache is not None:
            wanted = [
                (layer + d, int(e))
                for d, rows in enumerate(predicted, 1)
                if layer + d < len(self.tokens)
                for e in np.flatnonzero(rows)
            ]
            self.cache = self.cache.routed(layer, counts, wanted)
        ahead = [
            queue_of(layer + d, rows, self._there(layer + d))
            for d, rows in enumerate(predicted, 1)
            if layer + d < len(self.tokens)
        ]
        there = self._there(layer)
        current, resident = queue_of(layer, counts, there), queue_of(layer, counts, ~there)
        plan = setting.scheduler(current, ahead, setting.costs, alpha, self.hit, resident)
        self.loads.extend(plan.load)
        self.prefetches.extend(plan.prefetch if setting.asynchronous else ())
        self.foreseen |= {(work.layer, work.expert) for work in self.prefetches}
        self.cpu.extend(plan.cpu)
        aside = {*plan.cpu}
        used = [(w.layer, w.expert) for w in resident if w not in aside]
        used.sort()
        self.accelerator.extend(key for key in used if not self._lands(key))
        self.awaited = {(w.layer, w.expert) for w in plan.load}
        self.awaited |= {key for key in used if self._lands(key)}
        return plan

    def _look_back(self, layer: int) -> None:
        """The horizon, by what came of a layer's prefetches."""
        if self.horizon is not None and layer:
            there, counts = self._there(layer), self.tokens[layer]
            ours = [key for key in self.foreseen if key[0] == layer]
            late = [k for k in ours if counts[k[1]] and (not there[k[1]] or self._lands(k))]
            unused = [k for k in self.ahead if k[0] == layer and not counts[k[1]]]
            self.horizon = self.horizon.adjusted(len(late), len(unused))
        self.foreseen = {key for key in self.foreseen if key[0] > layer}
        self.ahead = {key for key in self.ahead if key[0] > layer}

    def _there(self, layer: int) -> np.ndarray:
        """bool[E]: resident, prefetched or on its way."""
        there = (self.resident if self.cache is None else self.cache.resident)[layer].copy()
        there[[b.key[1] for b in self.buffers.all if b.key and b.key[0] == layer]] = True
        return there

    def _lands(self, key: Key) -> bool:
        """Whether the expert is on its way. The link brings one at a time."""
        return self.flying is not None and self.flying[0] == key

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
            self.computed = key
            if self.buffers.place(key) is not None:
                self.buffers = self.buffers.read_begun(key)
            times = int(self.passes[key])
            self._after(times * self.setting.costs.accelerator, "accelerator", key)

    def _link(self) -> None:
        queue = self.loads or (self.prefetches if self.may_prefetch else None)
        if self.flying or not queue:
            return
        computing = self.cpu_busy or self.accelerator_busy or self.accelerator
        if not self.setting.asynchronous and computing:
            return
        key, ahead = (queue[0].layer, queue[0].expert), queue is self.prefetches
        if not self._given_room(key, ahead):
            return
        queue.popleft()
        self.flying = key, self.now + self.load_s
        self.link_s += self.load_s
        self._after(self.load_s, "landed", key)
        if ahead:
            self.begun += 1
            self.ahead.add(key)
            if not queue:
                self.critical.add(key)

    def _given_room(self, key: Key, ahead: bool) -> bool:
        """Whether an expert that is to come has a place now: of somebody whom the layer does not
        need, where residents change, else a buffer."""
        if self.cache is not None:
            kept = {*self.accelerator, *self.awaited, *([self.computed] if self.computed else [])}
            victim = self.cache.victim(key, kept)
            if victim is not None:
                self.cache = self.cache.swapped(victim, key)
                return True
            if ahead:
                return False
        buffers = self.buffers.begun(key, ahead=ahead)
        if buffers is None:
            return False
        self.buffers = buffers
        return True

    def _after(self, seconds: float, what: str, key: Key) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, key))

    def _next_event(self) -> None:
        self.now, _, what, key = heapq.heappop(self.events)
        if what == "cpu":
            self.cpu_busy, self.cpu_end = False, self.now
        elif what == "accelerator":
            self.accelerator_busy, self.accelerator_end = False, self.now
            self.computed = None
            if self.buffers.place(key) is not None:
                self.buffers = self.buffers.read_ended(key)
        else:
            self.flying = None
            if self.buffers.place(key) is not None:
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
