"""ARC, adaptive replacement (Megiddo and Modha, FAST 2003, Figure 4), of one layer's cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Directory(NamedTuple):
    """The experts that are in the cache, and those that were in it lately. Every list goes from the
    least to the most recently used."""

    once: tuple[int, ...] = ()
    """T1: seen once lately."""
    often: tuple[int, ...] = ()
    """T2: seen at least twice."""
    gone_once: tuple[int, ...] = ()
    """B1: evicted from T1."""
    gone_often: tuple[int, ...] = ()
    """B2: evicted from T2."""
    aim: float = 0.0
    """p: how many of the cells `once` should have."""

    def reference(self, experts: Sequence[int], cells: int) -> Directory:
        """The directory after references to the experts, one after the other. Lists are tuples
        again only at the end: one by one they took half of a policy's time.

        - `cells`: of the layer, 1 or more.
        """
        once, often, gone_once, gone_often = map(list, self[:4])
        aim = self.aim

        def evict(was_often: bool = False) -> None:
            """REPLACE."""
            held = len(once)
            from_once = held and (held > aim or (was_often and held == aim))
            if from_once or not often:
                gone_once.append(once.pop(0))
            else:
                gone_often.append(often.pop(0))

        def trim() -> None:
            """Trims to `cells` experts in the cache, and in T1 and B1, and twice that in all
            lists."""
            while len(once) + len(often) > cells:
                evict()
            del gone_once[: max(len(once) + len(gone_once) - cells, 0)]
            rest = 2 * cells - len(once) - len(often) - len(gone_once)
            del gone_often[: max(len(gone_often) - rest, 0)]

        for expert in experts:
            trim()
            aim = min(aim, float(cells))
            here = once if expert in once else often if expert in often else None
            if here is not None:
                here.remove(expert)
                often.append(expert)
                continue
            was_once, was_often = expert in gone_once, expert in gone_often
            if was_once:
                aim = min(float(cells), aim + max(1.0, len(gone_often) / len(gone_once)))
                gone_once.remove(expert)
            elif was_often:
                aim = max(0.0, aim - max(1.0, len(gone_once) / len(gone_often)))
                gone_often.remove(expert)
            if len(once) + len(often) == cells:
                evict(was_often)
            if was_once or was_often:
                often.append(expert)
            else:
                once.append(expert)
                trim()
        return Directory(tuple(once), tuple(often), tuple(gone_once), tuple(gone_often), aim)

    def order(self) -> tuple[int, ...]:
        """The experts in the cache, the next one to evict first."""
        # What REPLACE would take: `once` down to its aim, `often`, the rest of `once`.
        first = max(len(self.once) - int(self.aim), 0)
        return (*self.once[:first], *self.often, *self.once[first:])
