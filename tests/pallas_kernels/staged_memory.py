"""What tables and arena should be after references and stages: the oracle of stage."""

import numpy as np

from pallas_kernels.stage.specs import Spec
from tests.pallas_kernels.contract import POISON
from tests.pallas_kernels.pager import Pager, tables_of

WEIGHTS = (1, 0, 0)


class Memory:
    """A pager for each layer, and bytes. Two places in the arena for each cell."""

    def __init__(self, spec: Spec, cell_versions, stores):
        self.spec, self.stores = spec, stores
        self.pagers = [Pager(cell_versions, spec.experts) for _ in range(spec.layers)]
        self.size = max(spec.record_rows) + 1
        cells = spec.layers * spec.cells
        self.arena = np.full((2 * cells * self.size, spec.hidden), POISON, np.uint16)
        for layer in range(spec.layers):
            self.regrant(layer, [0] * spec.cells)

    @property
    def tables(self):
        return tables_of(self.pagers, WEIGHTS)

    def regrant(self, layer, place):
        first = 2 * layer * self.spec.cells
        rows = [-1 if p < 0 else (first + 2 * i + p) * self.size + 1 for i, p in enumerate(place)]
        self.pagers[layer].regrant(rows)

    def move(self, layer, expert, version, row):
        record = self.stores[version][layer, expert]
        self.arena[row : row + len(record)] = record

    def reference(self, layer, active):
        work = self.pagers[layer].reference(active, WEIGHTS)
        for i in range(work.fill_count):
            self.move(layer, work.fill_expert[i], work.fill_version[i], work.fill_row[i])

    def stage(self, layer, entries):
        """One layer's part of a list; whether each entry was carried out."""
        pager, done, cells, experts = self.pagers[layer], [], set(), set()
        busy = {
            i
            for i, cell in enumerate(pager.cells)
            if cell.owner is not None and cell.last_used == pager.clock
        }
        for entry_layer, expert, version, index in entries:
            exists = (
                entry_layer == layer
                and 0 <= expert < self.spec.experts
                and 0 <= version < len(self.stores)
                and 0 <= index < self.spec.cells
            )
            done.append(exists and index not in busy | cells and expert not in experts)
            if not done[-1]:
                continue
            cell = pager.cells[index]
            mine = [c for c in pager.cells if c.owner == expert]
            done[-1] = (
                cell.row >= 0
                and cell.version == version
                and not any(c.version == version for c in mine)
            )
            if not done[-1]:
                continue
            if cell.owner is not None:
                del pager.where[cell.owner]
            for other in mine:
                other.owner = None
            cell.owner, cell.last_used = expert, pager.clock - 1
            pager.where[expert], pager.version[expert] = cell, version
            cells.add(index)
            experts.add(expert)
            self.move(layer, expert, version, cell.row)
        return done
