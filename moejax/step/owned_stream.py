"""Streams experts through a window of two layers, in an arena that the native library owns. All
experts of a layer are in the window before the layer runs; afterwards its cells pass to a later
layer.

This is FluxMoE (shared/papers.md, section 3): no routing is predicted, and KV gets the memory that
experts do not need. The step is one executable (moejax.step.compiled_step), which finds experts by
experts.materialize. Programs know an expert by (layer, expert) alone, and `Tables.address` is the
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
    """Streams experts inside of the compiled step.

    - `set_tables`: Executor.set_tables.
    """

    staging_bytes = 0
    """Device memory of the coming layer outside of the arena."""
    window: WindowSpec | None = None
    """The open window; None before `open`, when no step can run."""

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
        """Gives experts their cells, fills the cells of residents and begins to load the first
        layer. Call it before the first step; KV may hold none of the window's slots."""
        self._set_tables(window.contents())
        rows, versions = window.residents()
        if (by_layer := self._buffers.layer_versions) is not None:
            versions = by_layer.of(versions)
        self._transport.populate(rows, versions)
        if self._steps.tiers:
            self._transport.drain()  # loading the first layer reads the packed records
        buffers = self._buffers
        buffers.arena = self._compiler.call(
            ProgramKey("load"), buffers.arena, buffers.tables, buffers.stores
        )
        self.window = window

    def change(self, window: WindowSpec) -> None:
        """Replaces the window, between two steps, and waits for the steps so far.

        Residents that stay keep their place or are copied within the arena. New residents come from
        the store, and former ones are forgotten. KV may hold none of the slots of either window.
        Raises ValueError if no window is open, or one of other layers and experts.
        """
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
        # An expert of the first layer that had not come is read through, and comes in the next
        # pass.
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
    """Finds each expert's cell: version → int32[L, E], the cell's arena row, −1 without a cell. A
    dense expert may be in the ring, of which only the first layer's half counts between two
    steps."""
    owner, row = tables["owner"][:, :experts], tables["cell_row"][:, :experts]
    own = np.where(owner == np.arange(experts), row, -1)
    packed = np.where(tables["cell_version"][:, :experts] == PACKED_VERSION, own, -1)
    dense = np.where(packed >= 0, -1, own)
    streams = (dense[0] < 0) & (tables["version"][0] == 0)
    dense[0] = np.where(streams, tables["address"][0], dense[0])
    return {0: dense, PACKED_VERSION: packed}
