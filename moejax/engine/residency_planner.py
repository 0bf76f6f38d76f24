"""FluxMoE's planner in the engine: it decides how many experts are resident while requests run.

Before each step it looks at the slots that KV needs, and takes them from experts at once if KV has
grown. After each interval of steps it weighs compute against modelled loading, and may move one
expert of every layer (host_offload.sizing.tiers). KV has all slots that experts do not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import Any

import numpy as np

from host_offload.control.window import WindowSpec, tiers_of
from host_offload.memory.arena import SlotClass
from host_offload.queue.device import TransferLost
from host_offload.sizing.tiers import (
    DENSE,
    HOST,
    PACKED,
    PlannerState,
    StorageModel,
    fit_placement,
    move_in_one_layer,
    plan_residency,
)
from moejax.engine.resize import empty_slot
from moejax.engine.scheduler import Scheduler
from moejax.errors import UserError
from moejax.step.executor import Executor

SMOOTHING = 0.1
"""Weight of the latest step in the smoothed compute time of a batch bucket."""

KEPT_MOVES = 1000


@dataclasses.dataclass
class ResidencyPlanner:
    """Asks the planner between steps, and carries out its placements.

    `τ_comp(theory)` of a batch bucket is the time of its decode steps, less the time that their ops
    waited for bytes, smoothed. So it follows batch and context; the paper instead measures a
    profile with every expert resident, and measures again when they shift. Prefill steps are not
    weighed, as in the paper.
    """

    runner: Executor
    scheduler: Scheduler
    model: StorageModel
    interval: int
    staggered: bool = True
    compute_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """Seconds of compute, by decode rows rounded up to a power of two."""
    moves: deque[dict[str, Any]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=KEPT_MOVES)
    )
    """Changes of placement. Each has the `step`s read before it, `why` (`kv`: KV grew; `rho`:
    compute and loading were weighed), experts of all layers in each tier, those of each layer at
    the `host`, bytes of experts and KV's slots."""
    deferred: int = 0
    """Changes that failed, because KV could not leave a slot or a record could not be brought or
    packed."""
    _state: PlannerState | None = None
    _due: deque[int] = dataclasses.field(default_factory=deque)
    """Buckets of decode steps that were read and not weighed yet."""
    _steps: int = 0
    _read_s: float | None = None
    _waited_s: float = 0.0

    @property
    def _window(self) -> WindowSpec:
        window = self.runner.window
        assert window is not None, "the runner began with one"
        return window

    @property
    def least_kv_slots(self) -> int:
        """Slots that KV needs so that a sequence of max_model_len can always run."""
        arena, longest = self.scheduler.arena, self.scheduler.max_model_len
        pages = arena.layout.page.pages(longest)
        return -(-pages // arena.layout.pages_per_slot)

    def kv_needs(self) -> int:
        """Returns how many slots KV needs: for pages in use, one more page for each running
        sequence, and waiting prompts that will get a free row. It is at least least_kv_slots, and
        at most what experts can give."""
        scheduler, arena = self.scheduler, self.scheduler.arena
        page = scheduler.page
        pages = arena.pages - scheduler.cache.available + page.groups * len(scheduler.running)
        for request in scheduler.first_waiting(len(scheduler.free_rows)):
            pages += max(page.pages(len(request.prompt)), request.blocks.pages) + page.groups
        slots = max(-(-pages // arena.layout.pages_per_slot), self.least_kv_slots)
        return min(slots, arena.slots - self._least_expert_slots())

    def before_step(self) -> None:
        """Changes the placement if needed. Call it before the work of a step is chosen."""
        window = self._window
        state = self._state or PlannerState(window.placement)
        arena = self.scheduler.arena
        room = (arena.slots - self.kv_needs()) * arena.layout.slot_bytes
        before, why = state.placement, "kv"
        fits = self._fit(before, room)
        if fits is not before:
            self._due.clear()
            state = PlannerState(fits, last=-1)
        while self._due and state.placement is before:
            why = "rho"
            state = plan_residency(
                self.model,
                state,
                compute_s=self.compute_s[self._due.popleft()],
                room_bytes=room,
                interval=self.interval,
                staggered=self.staggered,
            )
        if state.placement is not before and not self._apply(state.placement, why):
            state = PlannerState(before, last=state.last)
        self._state = state

    def after_read(self, kind: str, rows: int, now: float) -> None:
        """Takes the time of a step that was read.

        - `rows`: rows that the step decoded.
        - `now`: seconds of any clock, the same in all calls.
        """
        self._steps += 1
        totals = self.runner.transport.totals()
        waited = 0.0 if totals is None else totals.wait_seconds or 0.0
        before, self._read_s = self._read_s, now
        waited, self._waited_s = waited - self._waited_s, waited
        if kind != "decode" or before is None:
            return
        took = max(now - before - waited, 0.0)
        bucket = 1 << max(rows - 1, 0).bit_length()
        had = self.compute_s.get(bucket, took)
        self.compute_s[bucket] = had + SMOOTHING * (took - had)
        self._due.append(bucket)

    def rest(self) -> None:
        """Notes that nothing runs, so that the idle time counts for no step."""
        self._read_s = None

    def stats(self) -> dict[str, Any]:
        """Returns statistics as plain data, for LLM.stats()."""
        window = self._window
        load = self.model.load_seconds(window.placement)
        return {
            "interval": self.interval,
            "staggered": self.staggered,
            "compute_s": dict(sorted(self.compute_s.items())),
            "load_s": load,
            "rho": {rows: s / load if load else None for rows, s in self.compute_s.items()},
            "host_rate": self.model.host_rate,
            "packed_rate": self.model.packed_rate,
            "deferred": self.deferred,
            "moves": [*self.moves],
        }

    def _fit(self, placement: np.ndarray, room: int) -> np.ndarray:
        """Returns the placement that leaves KV its room, by moves of this planner if they can."""
        if not self.staggered:
            with contextlib.suppress(ValueError):
                return fit_placement(self.model, placement, room, move_in_one_layer)
        return fit_placement(self.model, placement, room)

    def _least_expert_slots(self) -> int:
        """Returns how many slots the window takes without residents."""
        window = self._window
        rows = window.halves * window.experts * window.record_rows
        return -(-rows // window.slot_rows)

    def _apply(self, placement: np.ndarray, why: str) -> bool:
        """Changes the placement. Returns False if KV cannot leave slots that experts need, or if a
        record could not be brought or packed."""
        stream, arena = self.runner.stream, self.scheduler.arena
        assert stream is not None, "the executor began with one"
        after = dataclasses.replace(self._window, tier=tiers_of(placement))
        if not self._room_for(after):
            self.deferred += 1
            return False
        try:
            stream.change(after)
        except (TransferLost, UserError):
            self.deferred += 1
            return False
        arena.grant_expert_slots(after.slots)
        arena.grant_kv_slots(arena.slots - after.slots)
        dense, packed, host = placement[:, [DENSE, PACKED, HOST]].sum(axis=0).tolist()
        where = {"dense": dense, "packed": packed, "host": host}
        where["by_layer"] = placement[:, HOST].tolist()
        taken = after.rows * arena.layout.hidden * 2
        held = {"expert_bytes": taken, "kv_slots": arena.count(SlotClass.KV)}
        self.moves.append({"step": self._steps, "why": why, **where, **held})
        return True

    def _room_for(self, window: WindowSpec) -> bool:
        """Moves KV out of the slots of a window, which are the first ones. Returns whether none of
        them is KV's now."""
        scheduler, arena = self.scheduler, self.scheduler.arena
        while arena.slots - arena.count(SlotClass.KV) < window.slots:
            first = arena.slots - arena.count(SlotClass.KV)
            empty_slot(scheduler, arena.layout.pages_per_slot, first)
            if scheduler.cache.holds(first):
                return False
            arena.grant_kv_slots(arena.count(SlotClass.KV) - 1)
        return True
