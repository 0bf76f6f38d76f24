"""The interface by which walks and the executor bring missing experts into their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from host_offload.memory.tables import Copy
from host_offload.queue.native import NativeQueue, Totals
from host_offload.queue.transfer import QueueSpec
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.experts import Elsewhere
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import Routing, StepSpec
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.stage import Entries

Parts = dict[tuple[str | None, int | None], Callable]
"""(part of a step, run of equal layers) → its executable."""


class LayerInputs(NamedTuple):
    """The inputs of a layer's experts."""

    step: ProgramKey
    layer: int
    x: jax.Array
    """[T, D]: the residual stream after attention."""
    normed: jax.Array
    """[T, D]: the normalised residual stream, input of the experts."""
    routing: Routing


class Transport:
    """Brings experts from the store into cells of the arena.

    This base class leaves the copies to the ops of the step, so no transfer is ever under way
    between programs. Subclasses override the methods whose work goes on beside compute.
    """

    spec: QueueSpec | None = None
    """The queue's settings; None: ops copy experts within the step."""
    queue: NativeQueue | None = None
    """The native library's queue, if that library carries out the transfers."""
    staging_bytes = 0
    """Device memory of records on their way, beside the programs' own."""
    stage_key = ProgramKey("stage")
    """The program by which a walk of layers carries out a layer's part of a stage list."""
    parts: Sequence[tuple[str, int | None]] = (("experts", None),)
    """The programs that `compute` calls: `part` and `run` of their keys (layer_programs)."""
    shared_parts: Sequence[tuple[str, int | None]] = (("accelerate", None),)
    """The programs that `compute_rows` calls, likewise."""

    def __init__(self, steps: StepSpec, buffers: Buffers, compiler: Compiler):
        self._buffers, self._compiler = buffers, compiler

    @classmethod
    def serves(cls, steps: StepSpec) -> bool:
        """Whether this class can serve these steps."""
        return True

    # ---- in a walk of layers

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Computes a MoE layer's experts. Returns (x after them, the layer's counts)."""
        buffers = self._buffers
        memory = buffers.stores, buffers.arena, buffers.tables
        computed_on = inputs.x, inputs.normed, *inputs.routing, buffers.numbers[inputs.layer]
        x, buffers.arena, buffers.tables, counts = parts["experts", None](*memory, *computed_on)
        return x, counts

    def compute_rows(
        self, parts: Parts, inputs: LayerInputs, share: Elsewhere
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the device's share of a layer's experts.

        - `share`: the second processor's experts, whose rows of y stay zero.

        Returns (y float32[T·K, D], the layer's counts).
        """
        buffers = self._buffers
        memory = buffers.stores, buffers.arena, buffers.tables
        computed_on = inputs.normed, inputs.routing.ids, buffers.numbers[inputs.layer]
        y, buffers.arena, buffers.tables, counts = parts["accelerate", None](
            *memory, *computed_on, share
        )
        return y, counts

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        """Carries out a layer's part of a stage list.

        - `done`: int32[STAGES], 1 for each entry that was carried out so far.
        - `ahead`: whether the layer's plan is still to come (`experts.stage_layer`).

        Returns `done` with the entries that were carried out now.
        """
        buffers = self._buffers
        memory = buffers.arena, buffers.tables, buffers.stores
        numbers = buffers.numbers[layer], buffers.numbers[int(ahead)]
        buffers.arena, buffers.tables, done = self._compiler.call(
            self.stage_key, *memory, *numbers, entries, done
        )
        return done

    def begin_output(self) -> tuple:
        """Returns the value that a walk of layers passes to its last program as
        `Programs.writes`."""
        return ()

    # ---- between steps

    def populate(self, rows: np.ndarray, versions: np.ndarray) -> None:
        """Copies experts of all layers into cells.

        - `rows`: int32[L, E], the arena row of each expert's cell; −1: the expert is not copied.
        - `versions`: int32[L, E], the version number in the cell.
        """
        buffers = self._buffers
        for layer, (row, version) in enumerate(zip(rows, versions, strict=True)):
            if np.any(row >= 0):
                places = np.int32(layer), row, version
                buffers.arena = self._compiler.call(
                    ProgramKey("populate"), buffers.arena, buffers.stores, *places
                )

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Begins to copy records into free cells, beside compute."""
        raise ValueError("the ops of a step copy records; take transfers='queue'")

    def ended_copies(self) -> dict[tuple[int, int], bool]:
        """Returns what became of copies since the last call: (layer, expert) → whether all bytes
        are there."""
        return {}

    def drain(self) -> None:
        """Ends all transfers into the arena before the program that is dispatched next. Experts
        that did not come are absent afterwards."""

    def failures(self, writes: int) -> list[TransferFailure]:
        """Returns the experts that a step could not compute because their bytes did not come.

        The step's outputs are wrong. Each failure is returned once, and the expert is absent for
        the steps to come.

        - `writes`: Results.writes of the step.
        """
        return []

    def totals(self) -> Totals | None:
        """The queue's counters so far; None without a queue."""
        return None

    def close(self) -> None:
        """Ends the transport, after the last step and before the store is freed."""
