"""WiSP's Algorithm 1 with read-through, for one layer, in plain Python: the oracle of plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from pallas_kernels.plan import Plan, Tables

INT = np.int32


@dataclasses.dataclass
class Cell:
    row: int
    """−1: not granted."""
    version: int
    owner: int | None = None
    last_used: int = 0


def log2_fixed(x: int) -> int:
    """2^12 · log2 of a positive integer, linear between powers of two, rounded down."""
    exponent = x.bit_length() - 1
    return exponent * 4096 + (x - 2**exponent) * 4096 // 2**exponent


class Pager:
    def __init__(self, cell_versions: Sequence[int], experts: int):
        self.cells = [Cell(-1, version) for version in cell_versions]
        self.where: dict[int, Cell] = {}
        self.version = [0] * experts
        self.frequency = [0] * experts
        self.fill_version = [0] * experts
        self.prior = [0] * experts
        self.clock = 0

    def regrant(self, rows: Sequence[int]) -> None:
        for cell, row in zip(self.cells, rows, strict=True):
            if cell.owner is not None and cell.row != row:
                del self.where[cell.owner]
                cell.owner = None
            cell.row = row

    def reference(self, active: Iterable[int], weights: Sequence[int]) -> Plan:
        """One reference to a set of experts; the plan's lists are padded as the op pads them."""
        self.clock += 1
        active = sorted(active)
        missing = [e for e in active if e not in self.where]
        for e in active:
            self.frequency[e] += 1
            if e not in missing:
                self.where[e].last_used = self.clock
        fills = []
        for e in missing:
            wanted = self.fill_version[e]
            self.version[e] = wanted if wanted >= 0 else -1 - wanted
            cell = self._cell_for(wanted, set(active), weights)
            if cell is None:
                continue
            if cell.owner is not None:
                del self.where[cell.owner]
            cell.owner, cell.last_used = e, self.clock
            self.where[e] = cell
            fills.append((e, cell.row, cell.version))
        read_through = len(missing) - len(fills)
        counts = len(fills), len(active) - len(missing), read_through
        lists = [active, *([fill[i] for fill in fills] for i in range(3))]
        a, e, r, v = (self._padded(values) for values in lists)
        return Plan(a, INT(len(active)), e, r, v, *map(INT, counts))

    def _cell_for(self, version: int, active: set[int], weights: Sequence[int]) -> Cell | None:
        mine = [cell for cell in self.cells if cell.row >= 0 and cell.version == version]
        for cell in mine:
            if cell.owner is None:
                return cell
        victims = [cell for cell in mine if cell.owner not in active]
        return min(
            victims, key=lambda c: (self._key(c, weights), c.last_used, c.owner), default=None
        )

    def _key(self, cell: Cell, weights: Sequence[int]) -> int:
        assert cell.owner is not None
        recency = -log2_fixed(self.clock - cell.last_used)
        frequency = log2_fixed(1 + self.frequency[cell.owner])
        terms = (recency, frequency, self.prior[cell.owner])
        return sum(w * term for w, term in zip(weights, terms, strict=True))

    def _padded(self, values: Sequence[int]) -> np.ndarray:
        return np.array([*values, *[-1] * (len(self.version) - len(values))], INT)


def tables_of(pagers: Sequence[Pager], weights: Sequence[int]) -> Tables:
    """The tables that stand for the layers' pagers."""
    experts = range(len(pagers[0].version))

    def of_cells(value) -> np.ndarray:
        return np.array([[value(cell) for cell in pager.cells] for pager in pagers], INT)

    def of_experts(value) -> np.ndarray:
        return np.array([[value(pager, e) for e in experts] for pager in pagers], INT)

    return Tables(
        cell_row=of_cells(lambda c: c.row),
        cell_version=of_cells(lambda c: c.version),
        owner=of_cells(lambda c: -1 if c.owner is None else c.owner),
        last_used=of_cells(lambda c: c.last_used),
        address=of_experts(lambda p, e: p.where[e].row if e in p.where else -1),
        version=of_experts(lambda p, e: p.version[e]),
        frequency=of_experts(lambda p, e: p.frequency[e]),
        fill_version=of_experts(lambda p, e: p.fill_version[e]),
        prior=of_experts(lambda p, e: p.prior[e]),
        clock=np.array([pager.clock for pager in pagers], INT),
        victim_weights=np.array(weights, INT),
    )
