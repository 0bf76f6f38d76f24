"""Allocates cells of several versions, or KV pages, out of whole slots, and plans moves that empty
slots again."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence

import numpy as np


class CellPools:
    """Books the slots that experts have, and which of their cells are taken.

    A slot is free, or cut into cells of one version until all of them are free again. A cell comes
    from the fullest slot of its version, the lowest among equals, so that other slots become empty.
    Taking a cell or giving it back looks only at slots with the same number of free cells.

    - `slots`: numbers of the slots.
    - `slot_rows`: arena rows of a slot.
    - `record_rows`, `cells_per_slot`: by version number.
    """

    def __init__(
        self,
        slots: Sequence[int],
        slot_rows: int,
        record_rows: Sequence[int],
        cells_per_slot: Sequence[int],
    ):
        self.slots = tuple(slots)
        self._slot_rows, self._record_rows = slot_rows, tuple(record_rows)
        self.cells_per_slot = tuple(cells_per_slot)
        self._free_slots = sorted(self.slots)
        self._version: dict[int, int] = {}
        """The version that a slot is cut for, by slot."""
        self._free: dict[int, list[int]] = {}
        """Arena rows of a slot's free cells, by slot."""
        # Slots by their number of free cells. A dict serves as a set that keeps its order.
        self._by_free: list[list[dict[int, None]]] = [
            [{} for _ in range(count + 1)] for count in self.cells_per_slot
        ]
        self._free_cells = [0] * len(self.cells_per_slot)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def free_cells(self, version: int) -> int:
        """Returns how many cells are free in slots that are cut for the version."""
        return self._free_cells[version]

    def count_taken(self, version: int) -> int:
        cut = sum(map(len, self._by_free[version]))
        return cut * self.cells_per_slot[version] - self._free_cells[version]

    def add(self, slots: Sequence[int]) -> None:
        """Adds slots, which are free."""
        self.slots = (*self.slots, *slots)
        self._free_slots = sorted([*self._free_slots, *slots])

    def remove(self, count: int, *, lowest: bool = False) -> list[int]:
        """Removes free slots, the highest or the lowest. Returns them. Raises ValueError, removing
        none, if fewer than `count` are free."""
        if count > len(self._free_slots):
            raise ValueError(f"{count} slots wanted, {len(self._free_slots)} are free")
        at = count if lowest else len(self._free_slots) - count
        low, high = self._free_slots[:at], self._free_slots[at:]
        gone, self._free_slots = (low, high) if lowest else (high[::-1], low)
        self.slots = tuple(slot for slot in self.slots if slot not in gone)
        return gone

    def allocate(self, version: int, keep: int = 0, but: int | None = None) -> int | None:
        """Takes a free cell. Returns its arena row, or None if no cell is free.

        - `keep`: free slots to leave uncut.
        - `but`: a slot to leave out.
        """
        slot = self._fullest(version, () if but is None else (but,))
        if slot is None:
            if len(self._free_slots) <= keep:
                return None
            slot = self._cut(version)
        return self._take(slot)

    def allocate_all(self, versions: np.ndarray) -> np.ndarray:
        """Takes a free cell for each entry of `versions`, one version after the other; −1 takes
        none. Returns int32 arena rows of the same shape, −1 without a cell. Raises ValueError if
        there are too few cells."""
        rows = np.full(versions.shape, -1, np.int32)
        for version in range(len(self.cells_per_slot)):
            for place in np.argwhere(versions == version):
                if (row := self.allocate(version)) is None:
                    raise ValueError(f"{len(self.slots)} slots have too few cells")
                rows[tuple(place)] = row
        return rows

    def is_taken(self, row: int) -> bool:
        """Whether a taken cell begins at this arena row."""
        slot = row // self._slot_rows
        return slot in self._version and row in self._rows(slot) and row not in self._free[slot]

    def release(self, row: int) -> None:
        """Gives back a cell by its arena row. Raises ValueError if no cell is taken there."""
        if not self.is_taken(row):
            raise ValueError(f"no cell is taken at arena row {row}")
        slot = row // self._slot_rows
        version, before = self._version[slot], len(self._free[slot])
        self._free[slot].append(row)
        self._refile(slot, before)
        if before + 1 == self.cells_per_slot[version]:
            del self._by_free[version][before + 1][slot], self._version[slot], self._free[slot]
            self._free_cells[version] -= self.cells_per_slot[version]
            bisect.insort(self._free_slots, slot)

    def compact(
        self,
        version: int,
        movable: Callable[[int], bool],
        most: int,
        closed: Collection[int] = (),
    ) -> list[tuple[int, int]]:
        """Moves cells out of the emptiest slot of a version whose cells may all move, into other
        slots. Repeated calls leave at most one slot that is neither full nor free.

        - `movable`: whether the taken cell at an arena row may move now.
        - `most`: most cells to move.
        - `closed`: slots that no cell may move into.

        Returns (from, to) arena rows of the moves, which the pools count as done.
        """
        for free in range(self.cells_per_slot[version] - 1, 0, -1):
            for slot in self._by_free[version][free]:
                kept = {*closed, slot}
                room = self._free_cells[version] - sum(
                    len(self._free[one]) for one in kept if self._version.get(one) == version
                )
                taken = [row for row in self._rows(slot) if row not in self._free[slot]]
                if room and all(map(movable, taken)):
                    return self._move_out(slot, taken[: min(most, room)], kept)
        return []

    def _move_out(
        self, slot: int, rows: Sequence[int], kept: Collection[int]
    ) -> list[tuple[int, int]]:
        version, moves = self._version[slot], []
        for row in rows:
            target = self._fullest(version, kept)
            assert target is not None, "free cells are miscounted"
            moves.append((row, self._take(target)))
            self.release(row)
        return moves

    def _rows(self, slot: int) -> range:
        version = self._version[slot]
        size, count = self._record_rows[version], self.cells_per_slot[version]
        return range(slot * self._slot_rows, slot * self._slot_rows + count * size, size)

    def _fullest(self, version: int, but: Collection[int] = ()) -> int | None:
        """Returns the slot with the fewest free cells but at least one, none of `but`; None if
        there is none."""
        for slots in self._by_free[version][1:]:
            if found := slots.keys() - but if but else slots:
                return min(found)
        return None

    def _cut(self, version: int) -> int:
        slot, count = self._free_slots.pop(0), self.cells_per_slot[version]
        self._version[slot] = version
        self._free[slot] = [*reversed(self._rows(slot))]
        self._by_free[version][count][slot] = None
        self._free_cells[version] += count
        return slot

    def _take(self, slot: int) -> int:
        before = len(self._free[slot])
        row = self._free[slot].pop()
        self._refile(slot, before)
        return row

    def _refile(self, slot: int, before: int) -> None:
        """Files a slot under its new number of free cells.

        - `before`: the old number.
        """
        version, free = self._version[slot], len(self._free[slot])
        del self._by_free[version][before][slot]
        self._by_free[version][free][slot] = None
        self._free_cells[version] += free - before
