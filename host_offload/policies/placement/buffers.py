"""The device buffers of PreScope's AsyncIO (section 4.4), as a frozen value of events.

Buffers are registered once and overwritten in place: two for loads on demand, which alternate, and
two groups for prefetches, one of even and one of odd layers, so that those of the layer to come
never overwrite what this layer still reads. An expert comes in three transfers. Whoever finds no
free buffer waits: nothing here is ever overwritten before its last read.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

PARTS = frozenset({"gate", "up", "down"})
"""The sub-transfers of an expert, each on a stream of its own."""

DEMAND_BUFFERS = 2

Key = tuple[int, int]
"""(layer, expert)"""


class Buffer(NamedTuple):
    """One expert's place."""

    key: Key | None = None
    """Whose it is; None: free."""
    missing: frozenset[str] = frozenset()
    """Parts that have not landed."""
    reading: bool = False
    wanted: bool = True
    """False: its layer is over, and what still flies into it is thrown away when it has landed."""


@dataclasses.dataclass(frozen=True)
class Buffers:
    """All buffers: two of loads on demand, then the groups of even and of odd layers."""

    group: int
    """Buffers of a prefetch group."""
    all: tuple[Buffer, ...]

    @classmethod
    def empty(cls, group: int) -> Buffers:
        """Nobody is there. Raises ValueError for groups of fewer than no buffers."""
        if group < 0:
            raise ValueError(f"a prefetch group of {group} buffers: give 0 or more")
        return cls(group, (Buffer(),) * (DEMAND_BUFFERS + 2 * group))

    def begun(self, key: Key, *, ahead: bool) -> Buffers | None:
        """With a load of the expert begun; None: there is no free buffer for it, it has to wait.
        Raises ValueError for an expert that is there or on its way."""
        if self.place(key) is not None:
            raise ValueError(f"expert {key} is there or on its way")
        first = DEMAND_BUFFERS + self.group * (key[0] % 2) if ahead else 0
        for place in range(first, first + (self.group if ahead else DEMAND_BUFFERS)):
            if self.all[place].key is None:
                return self._with(place, Buffer(key, PARTS))
        return None

    def landed(self, key: Key, part: str) -> Buffers:
        """With one part there. Raises ValueError for a part that is not on its way."""
        place = self.place(key)
        if place is None or part not in self.all[place].missing:
            raise ValueError(f"{part} of expert {key} is not on its way")
        buffer = self.all[place]
        buffer = buffer._replace(missing=buffer.missing - {part})
        return self._with(place, buffer if buffer.missing or buffer.wanted else Buffer())

    def is_there(self, key: Key) -> bool:
        """Whether all parts of the expert have landed, for a layer that is not over."""
        place = self.place(key)
        return place is not None and self.all[place].wanted and not self.all[place].missing

    def read_begun(self, key: Key) -> Buffers:
        """With the expert being computed. Raises ValueError where it is not all there."""
        place = self.place(key)
        if place is None or not self.is_there(key):
            raise ValueError(f"expert {key} is not there")
        return self._with(place, self.all[place]._replace(reading=True))

    def read_ended(self, key: Key) -> Buffers:
        """With the expert computed, its buffer free: an expert is read once a layer. Raises
        ValueError where nobody reads it."""
        place = self.place(key)
        if place is None or not self.all[place].reading:
            raise ValueError(f"nobody reads expert {key}")
        return self._with(place, Buffer())

    def layer_ended(self, layer: int) -> Buffers:
        """With nobody wanted any more who came for layers up to this one. What flies lands first,
        and what is read is read to its end."""
        return dataclasses.replace(self, all=tuple(_over(buffer, layer) for buffer in self.all))

    def place(self, key: Key) -> int | None:
        """Which buffer is the expert's; None: none."""
        return next((i for i, buffer in enumerate(self.all) if buffer.key == key), None)

    def _with(self, place: int, buffer: Buffer) -> Buffers:
        return dataclasses.replace(self, all=(*self.all[:place], buffer, *self.all[place + 1 :]))


def _over(buffer: Buffer, layer: int) -> Buffer:
    if buffer.key is None or buffer.key[0] > layer or buffer.reading:
        return buffer
    return buffer._replace(wanted=False) if buffer.missing else Buffer()
