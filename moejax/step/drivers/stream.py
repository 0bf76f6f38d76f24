"""The stream driver: before a layer runs, all its experts are there; afterwards their cells go on.

FluxMoE (shared/papers.md, section 3): no routing is predicted, and memory that experts do not need
is KV's. The step is the device driver's executable (moejax.step.drivers.device) with another way to
find experts (experts.materialize); programs know an expert by (layer, expert) alone, and
`Tables.address` is the page table, remapped in each pass.
"""

from __future__ import annotations

import numpy as np

from host_offload.control.window import WindowSpec
from moejax.step.programs import ProgramKey
from moejax.step.results import Results
from moejax.step.runner import Runner


class StreamRunner(Runner):
    """A Runner whose experts stream through a window of two layers, beside compute."""

    driver = "stream"

    window: WindowSpec | None = None
    """None: there is none yet, so no step can run."""

    def open_window(self, window: WindowSpec) -> None:
        """Gives experts their cells, fills those of residents and begins to load the first layer.
        Before the first step, or between steps: KV may have none of its slots."""
        contents = window.contents()
        self.set_tables(contents)
        version = np.asarray(self.tables.version)
        for layer, row in enumerate(contents["address"]):
            if np.any(row >= 0):
                places = np.int32(layer), row, version[layer]
                self.arena = self._call(ProgramKey("populate"), self.arena, self.stores, *places)
        self.window = window

    def check_results(self, results: Results) -> None:
        """Raises RuntimeError where experts had other memory during a step than the window."""
        expected = None if self.window is None else self.window.slots
        if results.cells != expected:
            raise RuntimeError(
                f"experts had {results.cells} cells in a step, and their window has {expected}"
            )
