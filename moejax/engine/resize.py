"""Moves the split of the arena between experts and KV, between two steps, by table contents
only."""

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
"""Most KV pages that a resize moves before one step, so that the step is delayed only a little."""


def check_grant(
    cells_shape: tuple[int, ...], slots: int, cells: Sequence[int], kv_slots: int
) -> None:
    """Raises ValueError for cells and KV slots that an arena cannot have at the same time.

    - `cells_shape`: (layers, most cells of a layer).
    - `slots`: slots of the arena.
    - `cells`: cells of each layer.
    """
    layers, bound = cells_shape
    if len(cells) != layers or any(not 0 <= n <= bound for n in cells):
        raise ValueError(f"cells per layer must be {layers} numbers of 0…{bound}: {cells}")
    if kv_slots < 0 or sum(cells) + kv_slots > slots:
        raise ValueError(f"{sum(cells)} cells + {kv_slots} KV slots of {slots} slots")


def check_one_version(runner: Executor) -> None:
    """Raises ValueError if experts have two versions, whose cells are laid out once."""
    if len(runner.layout.records) > 1 or runner.placement is not None:
        raise ValueError("cells of two versions are laid out once, at the start")


def grant(runner: Executor, arena: SlotArena, cells: Sequence[int], kv_slots: int) -> None:
    """Gives each layer so many cells and KV so many slots.

    The side that shrinks goes first, so at no moment do both sides hold a slot. Raises ValueError
    if KV in use would have to go. After any error the split is what it was.
    """
    know_cells(runner, arena)
    with _all_or_nothing(arena):
        if kv_slots < arena.count(SlotClass.KV):
            arena.grant_kv_slots(kv_slots)
        if list(cells) != cells_of(arena):
            runner.grant_cells(arena.grant_cells(cells))
    # Only bookkeeping is left, and the slots are free.
    arena.grant_kv_slots(kv_slots)


def know_cells(runner: Executor, arena: SlotArena) -> None:
    """Reads the cells of each layer from the tables if cells pass from layer to layer. Waits for
    the device."""
    if runner.pooled:
        arena.cell_row = np.array(runner.tables.cell_row)


def cells_of(arena: SlotArena) -> list[int]:
    """Returns how many cells each layer has."""
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
    """Carries out, before a step, the splits that policies want while requests run.

    A slot that changes sides must be empty. So if KV shrinks, idle blocks are dropped, pages are
    moved together and sessions between turns are moved out, at most MOVED_PAGES pages before a
    step. Layers get the slots as they become empty. Pages of running requests are not moved out.

    KV keeps the pages that running requests, sessions and one new request need (least_pages). A
    resize that wants more of KV waits for the rest. Sessions may still grow later; `take_slot`
    serves them.
    """

    runner: Executor
    scheduler: Scheduler
    resizes: int = 0
    """Resizes that were carried out and changed the split."""
    slots_moved: int = 0
    """Slots that changed sides."""
    deferred: int = 0
    """Steps before which a resize was not carried out in full."""
    failed: int = 0
    """Resizes dropped because the device refused a copy."""
    _moving: bool = False

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        """Moves the split towards what a policy wants.

        - `cells`: cells of each layer; None: unchanged.
        - `kv_pages`: pages of KV, rounded up to slots; None: unchanged.

        Raises PolicyError for a split that the arena can never have. Raises the device's error if a
        copy failed to which the arena or the tables were donated: they are lost, and so is the
        engine.
        """
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
            # Deleted arrays were donated to an executable that failed.
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
        """Gives KV one more slot: a free slot, or a cell of the layer with the most cells.

        Call it when requests wait for pages and nothing can be dispatched. So every request that
        the split at the start could serve runs in the end. An unfinished resize goes on before the
        next step. Returns False if experts have no cells left.
        """
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
        """Limits how many sequences run at once. Sequences that run already go on."""
        self.scheduler.max_running = min(max_running, self.scheduler.max_num_seqs)

    def stats(self) -> dict[str, Any]:
        """Returns statistics as plain data, for LLM.stats()."""
        return {
            "max_running": self.scheduler.max_running,
            "resizes": self.resizes,
            "slots_moved": self.slots_moved,
            "pages_moved": self.scheduler.cache.moved,
            "deferred": self.deferred,
            "failed": self.failed,
        }

    def _check(self, wanted: list[int], kv_wanted: int) -> None:
        """Raises ValueError for a split that the arena can never have."""
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
        """Returns the KV slots to aim at now: at least those of least_pages, if KV has them."""
        arena = self.scheduler.arena
        least = -(-least_pages(self.scheduler) // arena.layout.pages_per_slot)
        return max(wanted, min(least, arena.count(SlotClass.KV)))

    def _shrink_kv(self, target: int) -> int:
        """Shrinks KV towards `target` slots as far as it can now. Returns how many KV has."""
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
    """Moves the split if every expert is always resident in one of two versions. KV gets slots when
    experts are demoted, and experts are promoted when KV gives slots back.

    Policies say how many pages KV should have. The precision policy chooses which experts are
    demoted, and the transitions decide which slots become empty (Transitions.aim). So KV waits
    until enough experts were demoted and cells were moved together, within the bounds of each step.
    """

    transitions: Transitions = dataclasses.field(kw_only=True)

    def take_slot(self) -> bool:
        return False  # only transitions empty a slot, and they need steps

    def _check(self, wanted: list[int], kv_wanted: int) -> None:
        if any(wanted):
            raise ValueError("layers have no cells of their own where every expert is resident")
        least = self.transitions.resident.least_slots()
        if kv_wanted < 0 or (left := self.scheduler.arena.slots - kv_wanted) < least:
            raise ValueError(f"{kv_wanted} KV slots leave {left} for experts, which need {least}")

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
        # Only bookkeeping: the slots are cut into cells when a transition needs one.
        if slots := arena.take_free_slots():
            transitions.add(slots)


def least_pages(scheduler: Scheduler) -> int:
    """Returns the pages that KV must keep.

    These are all pages that the longest waiting or running request may need. They are also those
    that admitted requests may need, sessions hold and one more sequence of max_model_len needs,
    less the pages that fit into host memory.
    """
    running = [r.admitted_pages for r in scheduler.running.values()]
    alone = max(scheduler.totals.most_pages, *running, 0)
    if scheduler.overflow == "recompute":
        return alone
    together = scheduler.admitted_pages + scheduler.sessions.pages
    longest = scheduler.pages_for(scheduler.max_model_len, 0)
    return max(alone, together + longest - scheduler.cache.swap_pages)


def empty_slot(scheduler: Scheduler, most: int, slot: int | None = None) -> int:
    """Moves pages out of a KV slot. Returns how many.

    - `most`: most pages to move.
    - `slot`: None takes the slot with the fewest pages.
    """
    moved = set(scheduler.cache.empty_slot(most, slot))
    for request in scheduler.running.values():
        if not moved.isdisjoint(request.blocks):
            scheduler.write_table(request, 0)
    return len(moved)


def move_out(scheduler: Scheduler, most: int) -> int:
    """Moves out at most `most` pages of sessions between turns, or of a preempted request. Returns
    how many pages became available."""
    before = scheduler.cache.available
    _ = scheduler.sessions.evict(most) or scheduler.evict_waiting(most)
    return scheduler.cache.available - before


def within(wanted: Sequence[int], have: Sequence[int], room: int) -> list[int]:
    """Returns cells of each layer on the way from `have` to `wanted`, at most `room` in all. Layers
    that shrink do so at once; layers that grow share the remaining room, the one that lacks most
    first."""
    cells = np.minimum(wanted, have)
    missing = np.subtract(wanted, cells)
    for _ in range(min(room - int(cells.sum()), int(missing.sum()))):
        layer = int(np.argmax(missing))
        cells[layer] += 1
        missing[layer] -= 1
    return cells.tolist()
