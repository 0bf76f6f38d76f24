"""The slot arena: one fixed buffer on the device, and the host's books of the use of each slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.device_memory import advise, remake_zeros
from host_offload.memory.layout import SlotLayout
from host_offload.memory.pools import CellPools
from host_offload.memory.tables import cold_tables
from pallas_kernels.cpu.arena import ArenaMemory


class SlotClass(IntEnum):
    FREE = 0
    EXPERT = 1
    KV = 2


class ArenaError(MemoryError):
    """The device did not give the memory of an arena."""

    def __init__(self, nbytes: int, message: str):
        super().__init__(f"an arena of {nbytes / 2**30:.2f} GiB cannot be allocated: {message}")
        self.nbytes = nbytes


def allocate_arena(rows: int, hidden: int, device: jax.Device) -> jax.Array:
    """Allocates the arena, uint16[rows, D] of zeros on the device. Raises ArenaError."""
    try:
        arena = jax.block_until_ready(make_zeros(rows, hidden, device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ArenaError(2 * rows * hidden, str(error).splitlines()[0]) from error
    if device.platform == "cpu":
        remake_zeros(arena.unsafe_buffer_pointer(), jax.block_until_ready(arena).nbytes)
    return arena


def make_zeros(rows: int, hidden: int, device: jax.Device) -> jax.Array:
    """Makes uint16[rows, D] of zeros on the device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros((rows, hidden), jnp.uint16), out_shardings=sharding)()


def own_arena(rows: int, hidden: int) -> ArenaMemory:
    """Allocates the arena as memory of the native CPU library: aligned to 2 MiB, in huge pages if
    the system gives them, each when it is first written. Raises MemoryError if the system refuses
    it at once."""
    memory = ArenaMemory(rows, hidden)
    advise(memory.address, memory.nbytes)
    return memory


def place_cells(
    cell_row: np.ndarray, per_layer: Sequence[int], slots: Iterable[int], slot_rows: int
) -> np.ndarray:
    """Grants each layer so many cells, one slot each.

    Cells keep their place as far as the numbers allow. New cells take the first of `slots` that no
    cell holds.

    - `cell_row`: int32[L, C], present cells.
    - `per_layer`: cells of each layer.
    - `slot_rows`: arena rows of a slot.

    Returns the new cell_row, a new array.
    """
    cell_row = cell_row.copy()
    for layer, wanted in enumerate(per_layer):
        cell_row[layer, np.flatnonzero(cell_row[layer] >= 0)[wanted:]] = -1
    held = set((cell_row[cell_row >= 0] // slot_rows).tolist())
    free = (int(slot) for slot in slots if slot not in held)
    for layer, wanted in enumerate(per_layer):
        have = int(np.sum(cell_row[layer] >= 0))
        for cell in np.flatnonzero(cell_row[layer] < 0)[: wanted - have]:
            cell_row[layer, cell] = next(free) * slot_rows
    return cell_row


class OutOfPages(Exception):
    """Raised if there are too few free pages. The caller waits, or moves something out."""


class SlotArena:
    """Books which slots, cells and pages are used, and for what. It touches no device memory; the
    device only sees contents of tables.

    - `layers`: MoE layers.
    - `experts`: experts of a layer.
    - `cells`: C, most cells of a layer.
    """

    def __init__(self, layout: SlotLayout, slots: int, layers: int, experts: int, cells: int):
        self.layout, self.slots, self.experts = layout, slots, experts
        self.slot_class = np.full(slots, SlotClass.FREE, np.int8)
        self.cell_row = np.full((layers, cells), -1, np.int32)
        self._by_version = False
        """Whether slots are cut into cells of several versions."""
        kv_rows, page = layout.kv_rows_per_slot, layout.page
        self._kv = CellPools((), kv_rows, (page.rows,), (layout.pages_per_slot,))

    # ---- experts

    def grant_cells(self, per_layer: Sequence[int]) -> np.ndarray:
        """Gives each layer so many dense cells, one slot each. Returns the new cell_row [L, C].

        Cells keep their place as far as the numbers allow, so that residents survive. Raises
        ValueError, changing nothing, if a layer would have more than C cells, or if KV leaves too
        few slots.
        """
        layers, bound = self.cell_row.shape
        if self._by_version:
            raise ValueError(
                "cells of several versions are laid out once, at the start; budgets of experts "
                "cannot move here"
            )
        if len(per_layer) != layers or any(not 0 <= n <= bound for n in per_layer):
            raise ValueError(f"cells per layer must be {layers} numbers of 0…{bound}: {per_layer}")
        available = int(np.sum(self.slot_class != SlotClass.KV))
        if sum(per_layer) > available:
            raise ValueError(f"{sum(per_layer)} cells wanted, {available} slots are not KV")
        # Experts fill the arena from the front and KV from the back: fewer moves when either grows.
        slots, slot_rows = np.flatnonzero(self.slot_class != SlotClass.KV), self.layout.slot_rows
        return self._set_cells(slots, place_cells(self.cell_row, per_layer, slots, slot_rows))

    def _set_cells(self, slots: np.ndarray, cell_row: np.ndarray) -> np.ndarray:
        """Makes the slots with cells experts' and the other ones of `slots` free. Returns the new
        cell_row."""
        self.slot_class[slots] = SlotClass.FREE
        self.slot_class[cell_row[cell_row >= 0] // self.layout.slot_rows] = SlotClass.EXPERT
        self.cell_row = cell_row
        return cell_row.copy()

    def grant_versions(self, per_layer: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Gives each layer so many cells of each version, [L, V], at the start, when nothing is
        resident. Cells of a slot may belong to several layers, but have one version.

        Returns (cell_row, cell_version) [L, C]. Raises ValueError, changing nothing, if a layer
        would have more than C cells, or if KV leaves too few slots.
        """
        layers, bound = self.cell_row.shape
        versions = len(self.layout.records)
        counts = np.asarray(per_layer)
        if counts.shape != (layers, versions) or counts.min() < 0 or counts.sum(1).max() > bound:
            raise ValueError(
                f"cells per layer must be {layers} × {versions} numbers of 0…{bound}, in a layer "
                f"{bound} at most: {counts.tolist()}"
            )
        slots = np.flatnonzero(self.slot_class != SlotClass.KV)
        record_rows = [record.rows for record in self.layout.records]
        rows, per_slot = self.layout.slot_rows, self.layout.cells_per_slot
        pools = CellPools(slots.tolist(), rows, record_rows, per_slot)
        tables = cold_tables(counts, self.experts, bound=bound)
        cell_version = tables.cell_version
        try:
            cell_row = pools.allocate_all(np.where(tables.cell_row >= 0, cell_version, -1))
        except ValueError as error:
            raise ValueError(
                f"cells {counts.sum(0).tolist()} of {versions} versions wanted; {len(slots)} slots "
                "are not KV"
            ) from error
        self._by_version = True
        return self._set_cells(slots, cell_row), cell_version

    def grant_expert_slots(self, slots: int) -> None:
        """Makes the first `slots` slots experts', for cells of any versions. It leaves cell_row
        alone: a placement says into which cells the slots are cut.

        Raises ValueError, changing nothing, if there are too few slots or KV holds one of them.
        """
        if slots > self.slots or np.any(self.slot_class[:slots] == SlotClass.KV):
            free = int(np.argmax([*(self.slot_class == SlotClass.KV), True]))
            raise ValueError(f"{slots} expert slots wanted, {free} at the front are not KV")
        self.slot_class[self.slot_class == SlotClass.EXPERT] = SlotClass.FREE
        self.slot_class[:slots] = SlotClass.EXPERT
        self._by_version = True

    def take_free_slots(self) -> list[int]:
        """Makes all free slots experts'. Returns their numbers."""
        slots = np.flatnonzero(self.slot_class == SlotClass.FREE)
        self.slot_class[slots] = SlotClass.EXPERT
        return slots.tolist()

    # ---- KV pages

    def grant_kv_slots(self, slots: int) -> None:
        """Makes exactly so many slots KV, from the back of the arena.

        Raises ValueError, changing nothing, if experts hold the wanted slots, or if more slots hold
        live pages (a KV slot must be empty to change class).
        """
        have, free = len(self._kv.slots), np.flatnonzero(self.slot_class == SlotClass.FREE)
        if slots > have + len(free):
            raise ValueError(f"{slots} KV slots wanted, {have + len(free)} are not experts'")
        if have - slots > self._kv.free_slots:
            live = have - self._kv.free_slots
            raise ValueError(f"{slots} KV slots wanted, {live} hold live pages")
        gone = self._kv.remove(max(have - slots, 0), lowest=True)
        new = free[::-1][: max(slots - have, 0)].tolist()
        self._kv.add(new)
        self.slot_class[gone], self.slot_class[new] = SlotClass.FREE, SlotClass.KV

    @property
    def pages(self) -> int:
        """All KV pages, used or free."""
        return len(self._kv.slots) * self.layout.pages_per_slot

    @property
    def free_pages(self) -> int:
        return self._kv.free_cells(0) + self._kv.free_slots * self.layout.pages_per_slot

    def allocate_pages(self, count: int, but: int | None = None) -> list[int]:
        """Takes pages, from the fullest slots first, so that other slots become empty.

        - `but`: a slot to leave out; the caller makes sure that the others have enough pages.

        Returns the KV rows of the pages. Raises OutOfPages, taking nothing, if too few are free.
        """
        if count > self.free_pages:
            raise OutOfPages(f"{count} pages wanted, {self.free_pages} of {self.pages} are free")
        rows = (self._kv.allocate(0, but=but) for _ in range(count))
        return [row for row in rows if row is not None]

    def release_pages(self, pages: Sequence[int]) -> None:
        """Gives pages back. Raises ValueError, and gives none back, if a page is not allocated or
        occurs twice."""
        for page in pages:
            if not self._kv.is_taken(page):
                raise ValueError(f"page at KV row {page} is not allocated")
        if len(set(pages)) != len(pages):
            raise ValueError("a page is named twice")
        for page in pages:
            self._kv.release(page)

    # ---- what holds the arena

    def count(self, slot_class: SlotClass) -> int:
        return int(np.sum(self.slot_class == slot_class))
