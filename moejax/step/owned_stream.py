"""Experts that stream through a window of two layers of an arena that the native library owns:
before a layer runs, all its experts are there; afterwards their cells go on.

FluxMoE (shared/papers.md, section 3): no routing is predicted, and memory that experts do not need
is KV's. The step is one executable (moejax.step.compiled_step) with another way to find experts
(experts.materialize); programs know an expert by (layer, expert) alone, and `Tables.address` is the
page table, remapped in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from host_offload.control.window import PACKED_VERSION, WindowSpec
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import StepSpec
from moejax.step.transports.transport import Transport

SetTables = Callable[[Mapping[str, np.ndarray]], None]
"""Executor.set_tables."""


class OwnedStream:
    """Streams inside of the compiled step.

    - `set_tables`: of the Executor.
    """

    staging_bytes = 0
    """Device memory of the coming layer outside of the arena."""
    window: WindowSpec | None = None
    """None: not open yet, so that no step can run."""

    def __init__(
        self,
        steps: StepSpec,
        buffers: Buffers,
        compiler: Compiler,
        transport: Transport,
        set_tables: SetTables,
    ):
        self._steps, self._buffers, self._compiler = steps, buffers, compiler
        self._transport, self._set_tables = transport, set_tables

    def open(self, window: WindowSpec) -> None:
        """Gives experts their cells, fills those of residents and begins to load the first layer.
        Before the first step: KV may have none of its slots."""
        self._set_tables(window.contents())
        self._transport.populate(*window.residents())
        if self._steps.tiers:
            self._transport.drain()  # what is packed is read as the first layer's experts are
        buffers = self._buffers
        buffers.arena = self._compiler.call(
            ProgramKey("load"), buffers.arena, buffers.tables, buffers.stores
        )
        self.window = window

    def change(self, window: WindowSpec) -> None:
        """Makes this the window of the steps to come, between two steps: who stays is where it was
        or is copied within the arena, who becomes resident comes from the store, and who was is
        forgotten. Waits for the steps. KV may have none of the slots of either window. Raises
        ValueError without a window before it, of the same layers and experts."""
        before, memory, buffers = self.window, self._buffers.memory, self._buffers
        if before is None or memory is None or before.tier.shape != window.tier.shape:
            raise ValueError("a window is changed to another one of the same model's")
        self._transport.drain()
        jax.block_until_ready(buffers.arena)
        held = {name: np.asarray(table) for name, table in buffers.tables._asdict().items()}
        contents, arena = window.contents(), memory.view()
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
        self._set_tables(contents)
        there = np.where(version == PACKED_VERSION, have[PACKED_VERSION], have[0]) >= 0
        self._transport.populate(np.where(there, -1, own), version)
        self._transport.drain()
        self.window = window


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
