"""The stream driver: before a layer runs, all its experts are there; afterwards their cells go on.

FluxMoE (shared/papers.md, section 3): no routing is predicted, and memory that experts do not need
is KV's. The step is the device driver's executable (moejax.step.drivers.device) with another way to
find experts (experts.materialize); programs know an expert by (layer, expert) alone, and
`Tables.address` is the page table, remapped in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from host_offload.control.window import PACKED_VERSION, WindowSpec
from host_offload.memory.layout import SlotLayout
from moejax.step.programs import ProgramKey
from moejax.step.results import Results
from moejax.step.runner import Runner


class StreamRunner(Runner):
    """A Runner whose experts stream through a window of two layers, beside compute."""

    driver = "stream"

    _before: tuple[int, WindowSpec] | None = None
    """The window before the latest change, and the arena's writes at that moment."""

    def open_window(self, window: WindowSpec) -> None:
        """Gives experts their cells, fills those of residents and begins to load the first layer.
        Before the first step: KV may have none of its slots."""
        self.set_tables(window.contents())
        self._fill(*window.residents())
        self._load_first()
        self.window = window

    def change_window(self, window: WindowSpec) -> None:
        """Makes this the window of the steps to come: who stays is where it was or is copied within
        the arena, who becomes resident comes from the store, and who was is forgotten. Between
        steps; waits for them. KV may have none of the slots of either window. Raises ValueError
        without a window before it, of the same layers and experts."""
        before = self.window
        if before is None or self.memory is None or before.tier.shape != window.tier.shape:
            raise ValueError("a window is changed to another one of the same model's")
        self.drain()
        jax.block_until_ready(self.arena)
        self._before = int(self.memory.token()[1]), before
        held = {name: np.asarray(table) for name, table in self.tables._asdict().items()}
        contents, arena = window.contents(), self.memory.view()
        have, want = _places(held, window.experts), _places(contents, window.experts)
        taken: list[tuple[int, np.ndarray]] = []
        for version, rows in ((0, window.record_rows), (PACKED_VERSION, before.packed_rows)):
            stays = (have[version] >= 0) & (want[version] >= 0)
            moves = stays & (have[version] != want[version])
            pairs = zip(have[version][moves], want[version][moves], strict=True)
            taken += [(to, arena[row : row + rows].copy()) for row, to in pairs]
        for row, record in taken:  # only now, since places overlap
            arena[row : row + len(record)] = record
        # One of the first layer that had not come is read through, and comes in the next pass.
        own, version = window.residents()
        lost = np.zeros_like(window.tier, bool)
        lost[0] = window.streams[0] & (have[0][0] < 0)
        contents["address"][lost] = -1
        ring = contents["owner"][0, window.experts :]
        ring[np.isin(ring, np.flatnonzero(lost[0]))] = -1
        self.set_tables(contents)
        there = np.where(version == PACKED_VERSION, have[PACKED_VERSION], have[0]) >= 0
        self._fill(np.where(there, -1, own), version)
        self.drain()
        self.window = window

    def _fill(self, rows: np.ndarray, versions: np.ndarray) -> None:
        """Fills the cells of residents at arena rows int32[L, E], −1: none, in these versions."""
        for layer, row in enumerate(rows):
            if np.any(row >= 0):
                places = np.int32(layer), row, versions[layer]
                self.arena = self._call(ProgramKey("populate"), self.arena, self.stores, *places)

    def _load_first(self) -> None:
        if self.steps.tiers:
            self.drain()  # what is packed is read as the first layer's experts are
        load = ProgramKey("load")
        self.arena = self._call(load, self.arena, self.tables, self.stores)

    def check_results(self, results: Results) -> None:
        """Raises RuntimeError where experts had other memory during a step than the window."""
        window = self.window
        if self._before is not None:
            writes, before = self._before
            # Writes wrap: the step ended before the change, or it is of the window since.
            window = before if (writes - results.writes) % 2**32 < 2**31 else window
        check_window(results, window, self.layout)


def check_window(results: Results, window: WindowSpec | None, layout: SlotLayout) -> None:
    """Raises RuntimeError for a step in which experts had other memory than the window's."""
    expected = 0 if window is None else window.rows
    if results.expert_rows != expected:
        row = layout.hidden * 2
        raise RuntimeError(
            f"experts had {results.expert_rows * row} bytes in a step, and their window has "
            f"{expected * row}"
        )


def _places(tables: Mapping[str, np.ndarray], experts: int) -> dict[int, np.ndarray]:
    """Version → int32[L, E]: the arena row of a cell in which an expert is, −1: of none. A dense
    one may be in the ring, of which only the first layer's half counts between two steps."""
    owner, row = tables["owner"][:, :experts], tables["cell_row"][:, :experts]
    own = np.where(owner == np.arange(experts), row, -1)
    packed = np.where(tables["cell_version"][:, :experts] == PACKED_VERSION, own, -1)
    dense = np.where(packed >= 0, -1, own)
    streams = (dense[0] < 0) & (tables["version"][0] == 0)
    dense[0] = np.where(streams, tables["address"][0], dense[0])
    return {0: dense, PACKED_VERSION: packed}
