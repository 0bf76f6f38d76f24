"""ARC, adaptive replacement (Megiddo and Modha, FAST 2003, Figure 4), of one layer's cells."""

from __future__ import annotations

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

    def reference(self, expert: int, cells: int) -> Directory:
        """The directory after a reference to the expert. cells: of the layer, 1 or more."""
        now, gone, was_often = self._trim(cells), False, False
        if expert in now.once or expert in now.often:
            now = now._replace(once=_without(now.once, expert))
            return now._replace(often=(*_without(now.often, expert), expert))
        sizes = len(now.gone_once), len(now.gone_often)
        if expert in now.gone_once:
            gone, aim = True, min(float(cells), now.aim + max(1.0, sizes[1] / sizes[0]))
            now = now._replace(aim=aim, gone_once=_without(now.gone_once, expert))
        elif expert in now.gone_often:
            gone = was_often = True
            aim = max(0.0, now.aim - max(1.0, sizes[0] / sizes[1]))
            now = now._replace(aim=aim, gone_often=_without(now.gone_often, expert))
        if len(now.once) + len(now.often) == cells:
            now = now._evict(was_often=was_often)
        if gone:
            return now._replace(often=(*now.often, expert))
        return now._replace(once=(*now.once, expert))._trim(cells)

    def order(self) -> tuple[int, ...]:
        """The experts in the cache, the next one to evict first."""
        # What calls of _evict would take: `once` down to its aim, `often`, the rest of `once`.
        first = max(len(self.once) - int(self.aim), 0)
        return (*self.once[:first], *self.often, *self.once[first:])

    def _evict(self, *, was_often: bool = False) -> Directory:
        """REPLACE."""
        held = len(self.once)
        from_once = held and (held > self.aim or (was_often and held == self.aim))
        if from_once or not self.often:
            gone = (*self.gone_once, self.once[0])
            return self._replace(once=self.once[1:], gone_once=gone)
        gone = (*self.gone_often, self.often[0])
        return self._replace(often=self.often[1:], gone_often=gone)

    def _trim(self, cells: int) -> Directory:
        """Trims to `cells` experts in the cache, and in T1 and B1, and twice that in all lists."""
        now, held = self, len(self.once) + len(self.often)
        gone = len(self.gone_once) + len(self.gone_often)
        few = held <= cells and len(self.once) + len(self.gone_once) <= cells
        if few and held + gone <= 2 * cells and self.aim <= cells:
            return self
        while len(now.once) + len(now.often) > cells:
            now = now._evict()
        gone_once = now.gone_once[max(len(now.once) + len(now.gone_once) - cells, 0) :]
        rest = 2 * cells - len(now.once) - len(now.often) - len(gone_once)
        gone_often = now.gone_often[max(len(now.gone_often) - rest, 0) :]
        aim = min(now.aim, float(cells))
        return now._replace(gone_once=gone_once, gone_often=gone_often, aim=aim)


def _without(experts: tuple[int, ...], expert: int) -> tuple[int, ...]:
    return tuple(e for e in experts if e != expert)
