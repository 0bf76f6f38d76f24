"""Places every expert in whole slots, in one of several versions, and counts how many fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.memory.layout import SlotLayout
from host_offload.memory.pools import CellPools

COLUMNS = 4
"""Least number of cells that a layer can have beyond its experts, for new copies on their way and
old ones to give back. One layer may use the spare cells of both versions, so more spares need more
columns."""


@dataclasses.dataclass(frozen=True)
class ResidentSpec:
    """The resident mode: every expert has a complete version in the first `slots` slots of the
    arena, and may change its version. resident_spec makes it."""

    slots: int
    slot_rows: int
    record_rows: tuple[int, ...]
    """Arena rows of one record, by version number."""
    cells_per_slot: tuple[int, ...]
    start: np.ndarray
    """int8[L, E]: the version of each expert at the start."""
    capacity: tuple[int, ...]
    """Most experts that can be in each version at once, by version number; see `capacity`."""
    spares: int
    """Cells of each version beyond those of residents; 0: versions never change."""
    step_bytes: int
    """Most bytes of transitions in a step, which may have one transition in any case."""
    move_bytes: int
    """Most bytes moved within the arena before a step, which may move one record in any case."""
    columns: int
    """Cells that a layer can have beyond its experts."""
    step_bytes_from: str = "list"
    """The origin of step_bytes, for people; `list`: only the stage list bounds a step."""
    arriving: bool = False
    """Whether the queue copies new versions beside the steps, and an expert has its new one when
    all bytes are there; else a step copies it, and the next one has it."""

    @property
    def cell_bound(self) -> int:
        """C of the tables."""
        return self.start.shape[1] + self.columns

    @property
    def said(self) -> dict[str, Any]:
        """The spec as JSON, for a trace's header; read_resident reads it."""
        return {**vars(self), "start": self.start.tolist()}

    def most_high(self, slots: int) -> int:
        """Returns how many experts can be in version 0 at once in so many slots, see `capacity`."""
        return _most_high(self.cells_per_slot, slots, self.start.size, self.spares)

    def least_slots(self, high: int = 0) -> int:
        """Returns the slots of all experts and spares, with `high` experts in version 0."""
        return int(_count_slots(self.cells_per_slot, self.start.size, self.spares)[high])


def read_resident(said: Mapping[str, Any] | None) -> ResidentSpec | None:
    """Reads ResidentSpec.said back from JSON. Raises TypeError or ValueError for anything else."""
    if said is None:
        return None
    tuples = {name: tuple(v) for name, v in said.items() if isinstance(v, list | tuple)}
    return ResidentSpec(**{**said, **tuples, "start": np.array(said["start"], np.int8)})


class Placement(NamedTuple):
    """The cell of every expert at the start."""

    resident: ResidentSpec
    pools: CellPools
    """Pools in which these cells are taken."""
    contents: dict[str, np.ndarray]
    """Contents of tables with these cells, int32; expert e of a layer has cell e."""


def slots_for(layout: SlotLayout, counts: Sequence[int], spares: int = 0) -> int:
    """Returns how many slots experts take.

    - `counts`: experts of each version, by version number.
    - `spares`: further cells of each version.
    """
    cells = zip(counts, layout.cells_per_slot, strict=True)
    return sum(-(-(count + spares) // per_slot) for count, per_slot in cells)


def slots_up_to(layout: SlotLayout, high: int, total: int, spares: int) -> int:
    """Returns the slots in which 0, 1, … or `high` of all experts can be in the first of two
    versions, the others in the second one, with the spares of both."""
    return int(_count_slots(layout.cells_per_slot, total, spares)[high])


def _most_high(cells_per_slot: tuple[int, ...], slots: int, total: int, spares: int) -> int:
    needed = _count_slots(cells_per_slot, total, spares)
    return int(np.searchsorted(needed, slots, side="right")) - 1


@functools.lru_cache(maxsize=32)
def _count_slots(cells_per_slot: tuple[int, ...], total: int, spares: int) -> np.ndarray:
    """Returns int64[total + 1], the slots in which 0, 1, … experts can be in the high version, with
    the spares.

    The numbers never fall. If a slot has several high cells, one more high expert can need one slot
    less; but with fewer slots, the transitions towards it would wait for ever.
    """
    high = np.arange(total + 1)
    per_high, per_low = cells_per_slot
    slots = -(-(high + spares) // per_high) - (-(total - high + spares) // per_low)
    return np.maximum.accumulate(slots)


def capacity(layout: SlotLayout, slots: int, total: int, spares: int = 1) -> tuple[int, int]:
    """Returns how many experts can be in each of two versions at once: (n, total).

    n is DynaExq's exclusive n in whole slots: the most experts in version 0, the high one, while
    all others are in version 1 and each version has its spare cells, also during transitions.

    - `total`: experts of all layers.
    - `spares`: spare cells of each version.

    Raises ValueError for other than two versions, for spares below 1, and if not even all experts
    in version 1 fit.
    """
    if len(layout.records) != 2:
        raise ValueError(f"transitions are between two versions, not {len(layout.records)}")
    if spares < 1:
        raise ValueError(
            "each version needs at least one spare cell, or no transition could begin; give "
            "spares=1 or more"
        )
    if (least := slots_for(layout, (0, total), spares)) > slots:
        low = layout.records[1].version
        raise ValueError(
            f"{total} experts in {low} and {spares} spare of each version take {least} slots of "
            f"{layout.slot_bytes} bytes, {least * layout.slot_bytes} in all; experts have {slots}: "
            f"give them more memory, a smaller low version, or page them (paged=true, such as "
            f"--precision dynaexq,paged=true)"
        )
    return _most_high(layout.cells_per_slot, slots, total, spares), total


def resident_spec(
    layout: SlotLayout,
    slots: int,
    start: np.ndarray,
    *,
    spares: int = 1,
    step_bytes: int | None = None,
) -> ResidentSpec:
    """Makes the ResidentSpec of an arena, whose fields the arguments are.

    - `start`: int[L, E]. With spares=0 it is a fixed map of any number of versions.
    - `step_bytes`: by default only the stage list bounds a step.

    Before a step at most the bytes of one slot move. Raises ValueError for versions that do not
    exist, if the start and the spares do not fit, and for step_bytes below 1.
    """
    start = np.asarray(start)
    versions = len(layout.records)
    if start.ndim != 2 or start.size == 0 or not 0 <= start.min() <= start.max() < versions:
        raise ValueError(f"a start is [L, E] of version numbers 0…{versions - 1}")
    counts = np.bincount(start.ravel(), minlength=versions).tolist()
    most = tuple(counts)
    if spares:
        most = capacity(layout, slots, start.size, spares)
        if counts[0] > most[0]:
            raise ValueError(
                f"{counts[0]} experts begin in {layout.records[0].version}, {most[0]} fit with "
                f"{spares} spare of each version"
            )
    elif (wanted := slots_for(layout, counts)) > slots:
        raise ValueError(
            f"the map takes {wanted} slots of {layout.slot_bytes} bytes, "
            f"{wanted * layout.slot_bytes} in all; experts have {slots}"
        )
    if step_bytes is not None and step_bytes < 1:
        raise ValueError(f"step_bytes must be at least 1, not {step_bytes}")
    largest = max(record.nbytes for record in layout.records)
    return ResidentSpec(
        slots=slots,
        slot_rows=layout.slot_rows,
        record_rows=tuple(record.rows for record in layout.records),
        cells_per_slot=layout.cells_per_slot,
        start=start.astype(np.int8),
        capacity=most,
        spares=spares,
        step_bytes=step_bytes or start.size * largest,
        move_bytes=layout.slot_bytes,
        columns=max(COLUMNS, versions * spares) if spares else 0,
    )


def place(resident: ResidentSpec) -> Placement:
    """Gives every expert a cell of its starting version, layer by layer. Cells of the high version
    come first in the arena."""
    sizes = resident.record_rows, resident.cells_per_slot
    pools = CellPools(range(resident.slots), resident.slot_rows, *sizes)
    (layers, experts), version = resident.start.shape, resident.start.astype(np.int32)
    row = pools.allocate_all(version)
    cell_row = np.full((layers, resident.cell_bound), -1, np.int32)
    cell_version, owner = np.zeros_like(cell_row), cell_row.copy()
    cell_row[:, :experts], cell_version[:, :experts] = row, version
    owner[:, :experts] = np.arange(experts)
    tables = {"cell_row": cell_row, "cell_version": cell_version, "owner": owner}
    return Placement(resident, pools, {**tables, "address": row, "version": version})
