"""Moving the line between experts and KV: table contents only, between two steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from host_offload.control.control import Moved
from host_offload.control.rules import PolicyError
from host_offload.control.transitions import Transitions
from host_offload.memory.arena import SlotArena, SlotClass
from host_offload.memory.swap import SWAP_PAGES
from moejax.engine.scheduler import Scheduler
from moejax.step.executor import Executor

log = logging.getLogger("moejax")

MOVED_PAGES = SWAP_PAGES
"""Most KV pages that a resize moves before one step, so that the step takes little longer."""


def check_grant(
    cells_shape: tuple[int, ...], slots: int, cells: Sequence[int], kv_slots: int
) -> None:
    """Raises ValueError for cells per layer and KV slots that an arena cannot have at once.
    cells_shape: (layers, most cells of one). slots: of the arena."""
    layers, bound = cells_shape
    if len(cells) != layers or any(not 0 <= n <= bound for n in cells):
        raise ValueError(f"cells per layer must be {layers} numbers of 0…{bound}: {cells}")
    if kv_slots < 0 or sum(cells) + kv_slots > slots:
        raise ValueError(f"{sum(cells)} cells + {kv_slots} KV slots of {slots} slots")


def check_one_version(runner: Executor) -> None:
    """Raises ValueError where experts have two versions, whose cells are laid out once."""
    if len(runner.layout.records) > 1 or runner.placement is not None:
        raise ValueError("cells of two versions are laid out once, at the start")


def grant(runner: Executor, arena: SlotArena, cells: Sequence[int], kv_slots: int) -> None:
    """Gives the layers so many cells and KV so many slots. Shrinks before it grows: at no moment do
    both sides hold a slot. Raises ValueError, changing nothing, where KV that is in use would have
    to go; what else goes wrong leaves the earlier split as well."""
    know_cells(runner, arena)
    with _all_or_nothing(arena):
        if kv_slots < arena.count(SlotClass.KV):
            arena.grant_kv_slots(kv_slots)
        if list(cells) != cells_of(arena):
            runner.grant_cells(arena.grant_cells(cells))
    # Bookkeeping only, and the slots are there.
    arena.grant_kv_slots(kv_slots)


def know_cells(runner: Executor, arena: SlotArena) -> None:
    """Which layer has which cells, where they go from layer to layer: waits for the device."""
    if runner.pooled:
        arena.cell_row = np.array(runner.tables.cell_row)


def cells_of(arena: SlotArena) -> list[int]:
    """Cells that each layer has."""
    return np.sum(arena.cell_row >= 0, axis=1).tolist()


@contextmanager
def _all_or_nothing(arena: SlotArena) -> Iterator[None]:
    kv_slots, cell_row = arena.count(SlotClass.KV), arena.cell_row
    experts = arena.slot_class == SlotClass.EXPERT
    try:
        yield
    except BaseException:
        arena.cell_row = cell_row
        arena.slot_class[arena.slot_class == SlotClass.EXPERT] = SlotClass.FREE
        arena.slot_class[experts] = SlotClass.EXPERT
        arena.grant_kv_slots(kv_slots)
        raise


@dataclasses.dataclass
class ArenaResizer:
    """Carries out, before a step, what policies want while requests run.

    A slot that changes sides must be empty. So where KV shrinks, idle blocks are dropped, pages are
    moved together and sessions between turns moved out, at most MOVED_PAGES pages before a step;
    layers get the slots as they become empty. KV that requests run on is not moved out, and KV
    keeps what all who run and all sessions hold beside a new request (least_pages): the rest of
    such a request waits. What that cannot foresee, sessions that grow later, `take_slot` is for.
    """

    runner: Executor
    scheduler: Scheduler
    resizes: int = 0
    """Requests carried out that changed something."""
    slots_moved: int = 0
    """Slots that KV gave or got."""
    deferred: int = 0
    """Steps that went by with a request that was not carried out in full."""
    failed: int = 0
    """Requests dropped because the device refused a copy."""
    _moving: bool = False

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        """cells: of each layer; None: as they are. kv_pages: rounded up to slots; None: as it is.
        Raises PolicyError for what can never be, and what the device says where a copy failed after
        the arena or the tables were donated to it: they are gone then, and with them the engine."""
        arena = self.scheduler.arena
        know_cells(self.runner, arena)
        had, kv_had = cells_of(arena), arena.count(SlotClass.KV)
        wanted = had if cells is None else [int(n) for n in cells]
        kv_wanted = kv_had if kv_pages is None else -(-kv_pages // arena.layout.pages_per_slot)
        try:
            self._check(wanted, kv_wanted)
        except ValueError as error:
            raise PolicyError(f"a policy wants what the arena cannot give: {error}") from error
        failed = False
        try:
            self._move(wanted, kv_wanted)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            # Those were given to an executable that returned none.
            given = jax.tree.leaves((self.runner.arena, self.runner.tables))
            if any(array.is_deleted() for array in given):
                raise
            log.warning("budgets stay as they were, a resize failed: %s", error)
            failed = True
        has, kv_has = cells_of(arena), arena.count(SlotClass.KV)
        changed = has != had or kv_has != kv_had
        settled = failed or (has == wanted and kv_has == kv_wanted)
        self._moving |= changed
        self.slots_moved += abs(kv_has - kv_had)
        self.failed += failed
        self.deferred += not settled
        if settled:
            self.resizes += self._moving and not failed
            self._moving = False
        return Moved(settled, changed)

    def take_slot(self) -> bool:
        """For a moment when requests wait for pages and nothing can be dispatched: gives KV one
        slot more, a free one or of the layer with the most cells; False: experts have none left. So
        nobody waits for ever whom the split at the start would have served. A resize request that
        is unfinished goes on before the next step."""
        arena = self.scheduler.arena
        know_cells(self.runner, arena)
        cells, kv_slots = cells_of(arena), arena.count(SlotClass.KV)
        if sum(cells) + kv_slots == arena.slots:
            if not any(cells):
                return False
            cells[int(np.argmax(cells))] -= 1
        grant(self.runner, arena, cells, kv_slots + 1)
        self.slots_moved += 1
        return True

    def limit(self, max_running: int) -> None:
        """No more sequences than so many begin to run from now on; those that do go on."""
        self.scheduler.max_running = min(max_running, self.scheduler.max_num_seqs)

    def stats(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "max_running": self.scheduler.max_running,
            "resizes": self.resizes,
            "slots_moved": self.slots_moved,
            "pages_moved": self.scheduler.cache.moved,
            "deferred": self.deferred,
            "failed": self.failed,
        }

    def _check(self, wanted: list[int], kv_wanted: int) -> None:
        """Raises ValueError for what can never be."""
        arena = self.scheduler.arena
        check_grant(arena.cell_row.shape, arena.slots, wanted, kv_wanted)

    def _move(self, wanted: list[int], kv_wanted: int) -> None:
        arena = self.scheduler.arena
        with _all_or_nothing(arena):
            kv_slots = self._kv_target(kv_wanted)
            if kv_slots < arena.count(SlotClass.KV):
                kv_slots = self._shrink_kv(kv_slots)
            room = arena.slots - kv_slots
            grant(self.runner, arena, within(wanted, cells_of(arena), room), kv_slots)

    def _kv_target(self, wanted: int) -> int:
        """KV slots to go to now: no fewer than least_pages, if it has them."""
        arena = self.scheduler.arena
        least = -(-least_pages(self.scheduler) // arena.layout.pages_per_slot)
        return max(wanted, min(least, arena.count(SlotClass.KV)))

    def _shrink_kv(self, target: int) -> int:
        """As far towards so many KV slots as can be now; returns how many there are."""
        arena, scheduler, left = self.scheduler.arena, self.scheduler, MOVED_PAGES
        while (slots := arena.count(SlotClass.KV)) > target:
            if empty := slots - scheduler.cache.slots_in_use:
                arena.grant_kv_slots(max(slots - empty, target))
                continue
            done = left and (empty_slot(scheduler, left) or move_out(scheduler, left))
            if not done:
                break
            left -= min(done, left)
        return arena.count(SlotClass.KV)


@dataclasses.dataclass
class ResidentResizer(ArenaResizer):
    """Where every expert is always resident in one of two versions: KV gets slots that experts can
    do without once fewer are high, and experts make more of theirs high when KV gives slots back.

    Policies say how many pages KV should have; who is demoted is the precision's decision, and
    which slot becomes empty that of its transitions (Transitions.aim), so a request of KV waits
    until enough were demoted and cells were moved together, within the bounds of each step.
    """

    transitions: Transitions = dataclasses.field(kw_only=True)

    def take_slot(self) -> bool:
        return False  # a slot becomes empty by transitions, and those ride in steps

    def _check(self, wanted: list[int], kv_wanted: int) -> None:
        if any(wanted):
            raise ValueError("layers have no cells of their own where every expert is resident")
        least = self.transitions.resident.least_slots()
        if kv_wanted < 0 or (left := self.scheduler.arena.slots - kv_wanted) < least:
            raise ValueError(f"{kv_wanted} KV slots leave {left} for experts, who need {least}")

    def _move(self, wanted: list[int], kv_wanted: int) -> None:
        arena, transitions = self.scheduler.arena, self.transitions
        kv_had = arena.count(SlotClass.KV)
        gone = transitions.aim(arena.slots - kv_wanted)
        if kv_wanted > kv_had:
            arena.slot_class[gone] = SlotClass.FREE
            arena.grant_kv_slots(kv_had + len(gone))
            return
        with _all_or_nothing(arena):
            kv_slots = self._kv_target(kv_wanted)
            if kv_slots < kv_had:
                self._shrink_kv(kv_slots)
        # Bookkeeping only: cells are cut from them when a transition needs one.
        if slots := arena.take_free_slots():
            transitions.add(slots)


def least_pages(scheduler: Scheduler) -> int:
    """Pages that KV must keep: all that the longest of those who wait or run may come to need; and,
    as far as host memory does not take it, what admitted requests may come to need, what sessions
    hold, and one more sequence of max_model_len."""
    live = [*scheduler.running.values(), *scheduler.waiting]
    alone = max((scheduler.pages_for(len(r.prompt), r.to_generate) for r in live), default=0)
    if scheduler.overflow == "recompute":
        return alone
    together = scheduler.admitted_pages + scheduler.sessions.pages
    longest = scheduler.pages_for(scheduler.max_model_len, 0)
    return max(alone, together + longest - scheduler.cache.swap_pages)


def empty_slot(scheduler: Scheduler, most: int, slot: int | None = None) -> int:
    """Moves at most so many pages out of a KV slot; how many were. slot: None: that with the
    fewest."""
    moved = set(scheduler.cache.empty_slot(most, slot))
    for request in scheduler.running.values():
        if not moved.isdisjoint(request.blocks):
            scheduler.write_table(request, 0)
    return len(moved)


def move_out(scheduler: Scheduler, most: int) -> int:
    """Moves out at most so many pages of sessions between turns, or of those that a preempted
    request kept; how many became available."""
    before = scheduler.cache.available
    _ = scheduler.sessions.evict(most) or scheduler.evict_waiting(most)
    return scheduler.cache.available - before


def within(wanted: Sequence[int], have: Sequence[int], room: int) -> list[int]:
    """Cells on the way from `have` to `wanted`, no more than `room` in all: who shrinks does at
    once, who grows gets of the room what is left, the neediest first."""
    cells = np.minimum(wanted, have)
    missing = np.subtract(wanted, cells)
    for _ in range(min(room - int(cells.sum()), int(missing.sum()))):
        layer = int(np.argmax(missing))
        cells[layer] += 1
        missing[layer] -= 1
    return cells.tolist()
