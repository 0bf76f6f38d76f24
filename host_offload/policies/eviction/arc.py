"""ARC, adaptive replacement (Megiddo and Modha, FAST 2003, Figure 4), of one layer's cells."""

from __future__ import annotations

from typing import NamedTuple


class Directory(NamedTuple):
    """Who is in a cache of some cells, and who was lately; every list from the least to the most
    recently used."""

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
        """After a reference to the expert, with so many cells, at least 1."""
        now = self._cut(cells)
        if expert in now.once or expert in now.often:
            once = _without(now.once, expert)
            return now._replace(once=once, often=(*_without(now.often, expert), expert))
        if expert in now.gone_once:
            more = max(1.0, len(now.gone_often) / len(now.gone_once))
            now = now._replace(aim=min(float(cells), now.aim + more))._evict(cells)
            gone = _without(now.gone_once, expert)
            return now._replace(gone_once=gone, often=(*now.often, expert))
        if expert in now.gone_often:
            fewer = max(1.0, len(now.gone_once) / len(now.gone_often))
            now = now._replace(aim=max(0.0, now.aim - fewer))._evict(cells, was_often=True)
            gone = _without(now.gone_often, expert)
            return now._replace(gone_often=gone, often=(*now.often, expert))
        if len(now.once) + len(now.gone_once) == cells:
            if len(now.once) < cells:
                now = now._replace(gone_once=now.gone_once[1:])._evict(cells)
            else:
                now = now._replace(once=now.once[1:])
        elif sum(map(len, now[:4])) >= cells:
            if sum(map(len, now[:4])) == 2 * cells:
                now = now._replace(gone_often=now.gone_often[1:])
            now = now._evict(cells)
        return now._replace(once=(*now.once, expert))

    def order(self) -> tuple[int, ...]:
        """Who is in the cache, the next one to be evicted first."""
        now, order = self, []
        while now.once or now.often:
            after = now._evict(0)
            order += [e for e in (*now.once, *now.often) if e not in (*after.once, *after.often)]
            now = after
        return tuple(order)

    def _evict(self, cells: int, *, was_often: bool = False) -> Directory:
        """REPLACE, where the cells are full."""
        if len(self.once) + len(self.often) < max(cells, 1):
            return self
        held = len(self.once)
        from_once = held and (held > self.aim or (was_often and held == self.aim))
        if from_once or not self.often:
            gone = (*self.gone_once, self.once[0])
            return self._replace(once=self.once[1:], gone_once=gone)
        gone = (*self.gone_often, self.often[0])
        return self._replace(often=self.often[1:], gone_often=gone)

    def _cut(self, cells: int) -> Directory:
        """For fewer cells than before."""
        now = self
        while len(now.once) + len(now.often) > cells:
            now = now._evict(cells)
        gone_once = now.gone_once[max(len(now.once) + len(now.gone_once) - cells, 0) :]
        rest = 2 * cells - len(now.once) - len(now.often) - len(gone_once)
        gone_often = now.gone_often[max(len(now.gone_often) - rest, 0) :]
        return now._replace(
            gone_once=gone_once, gone_often=gone_often, aim=min(now.aim, float(cells))
        )


def _without(experts: tuple[int, ...], expert: int) -> tuple[int, ...]:
    return tuple(e for e in experts if e != expert)
