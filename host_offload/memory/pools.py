"""Cells of several versions, or KV pages, out of whole slots: free lists, and moves that empty
slots again."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np


class CellPools:
    """The slots that experts have, and which of their cells are taken.

    A slot is free, or cut into the cells of one version until all of them are free again. Taking
    and giving back a cell looks at no more slots than have as many free cells. Cells come from the
    fullest slot of their version, of equals from the lowest, so that slots become empty together.

    slots: their numbers. slot_rows: arena rows of one. record_rows, cells_per_slot: by version
    number.
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
        """Slot → the version it is cut for."""
        self._free: dict[int, list[int]] = {}
        """Slot → rows of its free cells."""
        # Slots by how many of their cells are free; a dict is a set that keeps its order.
        self._by_free: list[list[dict[int, None]]] = [
            [{} for _ in range(count + 1)] for count in self.cells_per_slot
        ]
        self._free_cells = [0] * len(self.cells_per_slot)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def free_cells(self, version: int) -> int:
        """Free cells of the slots cut for that version."""
        return self._free_cells[version]

    def count_taken(self, version: int) -> int:
        cut = sum(map(len, self._by_free[version]))
        return cut * self.cells_per_slot[version] - self._free_cells[version]

    def add(self, slots: Sequence[int]) -> None:
        """These slots too, all free."""
        self.slots = (*self.slots, *slots)
        self._free_slots = sorted([*self._free_slots, *slots])

    def remove(self, count: int, *, lowest: bool = False) -> list[int]:
        """Gives away so many free slots, the highest or the lowest. Raises ValueError, giving none,
        where there are not so many."""
        if count > len(self._free_slots):
            raise ValueError(f"{count} slots wanted, {len(self._free_slots)} are free")
        at = count if lowest else len(self._free_slots) - count
        low, high = self._free_slots[:at], self._free_slots[at:]
        gone, self._free_slots = (low, high) if lowest else (high[::-1], low)
        self.slots = tuple(slot for slot in self.slots if slot not in gone)
        return gone

    def allocate(self, version: int, keep: int = 0, but: int | None = None) -> int | None:
        """The arena row of a free cell; None where there is none and no more than `keep` free
        slots. but: a slot of which none is taken."""
        slot = self._fullest(version, but)
        if slot is None:
            if len(self._free_slots) <= keep:
                return None
            slot = self._cut(version)
        return self._take(slot)

    def allocate_all(self, versions: np.ndarray) -> np.ndarray:
        """int32 of the shape of `versions`: the arena row of a free cell of each, one version after
        the other, in order; −1 where the version is. Raises ValueError where there are too few."""
        rows = np.full(versions.shape, -1, np.int32)
        for version in range(len(self.cells_per_slot)):
            for place in np.argwhere(versions == version):
                if (row := self.allocate(version)) is None:
                    raise ValueError(f"{len(self.slots)} slots have too few cells")
                rows[tuple(place)] = row
        return rows

    def is_taken(self, row: int) -> bool:
        """Whether a cell that was allocated begins at this arena row."""
        slot = row // self._slot_rows
        return slot in self._version and row in self._rows(slot) and row not in self._free[slot]

    def release(self, row: int) -> None:
        """Gives back a cell by its arena row. Raises ValueError where none is taken there."""
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
        self, version: int, movable: Callable[[int], bool], most: int
    ) -> list[tuple[int, int]]:
        """Moves at most so many cells of the emptiest slot of that version that may move into the
        others, as (from, to) arena rows; the cells count as moved at once. Called again and again
        it leaves at most one slot neither full nor free.

        movable: whether the cell taken at a row may move now. A slot moves whole or not at all.
        """
        for free in range(self.cells_per_slot[version] - 1, 0, -1):
            for slot in self._by_free[version][free]:
                room = self._free_cells[version] - free
                taken = [row for row in self._rows(slot) if row not in self._free[slot]]
                if room and all(map(movable, taken)):
                    return self._move_out(slot, taken[: min(most, room)])
        return []

    def _move_out(self, slot: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        version, moves = self._version[slot], []
        for row in rows:
            target = self._fullest(version, but=slot)
            assert target is not None, "free cells are miscounted"
            moves.append((row, self._take(target)))
            self.release(row)
        return moves

    def _rows(self, slot: int) -> range:
        version = self._version[slot]
        size, count = self._record_rows[version], self.cells_per_slot[version]
        return range(slot * self._slot_rows, slot * self._slot_rows + count * size, size)

    def _fullest(self, version: int, but: int | None = None) -> int | None:
        """The slot with the fewest free cells, but some."""
        for slots in self._by_free[version][1:]:
            if found := slots.keys() - {but} if but in slots else slots:
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
        """The slot has other free cells than before."""
        version, free = self._version[slot], len(self._free[slot])
        del self._by_free[version][before][slot]
        self._by_free[version][free][slot] = None
        self._free_cells[version] += free - before
