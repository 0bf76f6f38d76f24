"""How experts that a step misses come into their cells, as walks and the executor see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from host_offload.control.step_record import LinkUse
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
    """What a layer's experts are computed from."""

    step: ProgramKey
    layer: int
    x: jax.Array
    """[T, D]: the residual stream after attention."""
    normed: jax.Array
    """[T, D]: what the experts compute on."""
    routing: Routing


class Transport:
    """Brings experts of the store into cells of the arena. This one leaves it to the ops of steps,
    so that nothing is ever on its way; others replace what they do beside compute."""

    spec: QueueSpec | None = None
    """The queue as it is; None: ops copy experts within the step."""
    queue: NativeQueue | None = None
    """The native library's queue, where that library carries transfers out."""
    staging_bytes = 0
    """Device memory of records on their way, beside what programs take."""
    stage_key = ProgramKey("stage")
    """The program by which a walk of layers carries out a layer's part of a stage list."""
    parts: Sequence[tuple[str, int | None]] = (("experts", None),)
    """Of layer_programs, `part` and `run` of keys: those that `compute` calls."""
    shared_parts: Sequence[tuple[str, int | None]] = (("accelerate", None),)
    """And those of `compute_rows`."""

    def __init__(self, steps: StepSpec, buffers: Buffers, compiler: Compiler):
        self._buffers, self._compiler = buffers, compiler

    @classmethod
    def serves(cls, steps: StepSpec) -> bool:
        """Whether steps like these are served."""
        return True

    # ---- in a walk of layers

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Returns (x after a MoE layer's experts, the layer's counts)."""
        buffers = self._buffers
        memory = buffers.stores, buffers.arena, buffers.tables
        computed_on = inputs.x, inputs.normed, *inputs.routing, buffers.numbers[inputs.layer]
        x, buffers.arena, buffers.tables, counts = parts["experts", None](*memory, *computed_on)
        return x, counts

    def compute_rows(
        self, parts: Parts, inputs: LayerInputs, share: Elsewhere
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (y float32[T·K, D] of a layer's experts, the layer's counts).

        - `share`: the second processor's, whose rows of y stay zero.
        """
        buffers = self._buffers
        memory = buffers.stores, buffers.arena, buffers.tables
        computed_on = inputs.normed, inputs.routing.ids, buffers.numbers[inputs.layer]
        y, buffers.arena, buffers.tables, counts = parts["accelerate", None](
            *memory, *computed_on, share
        )
        return y, counts

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        """Carries out a layer's part of a stage list; returns `done` with the entries that were.

        - `done`: int32[STAGES], 1 for each entry that was carried out so far.
        - `ahead`: before the layer's plan (`experts.stage_layer`).
        """
        buffers = self._buffers
        memory = buffers.arena, buffers.tables, buffers.stores
        numbers = buffers.numbers[layer], buffers.numbers[int(ahead)]
        buffers.arena, buffers.tables, done = self._compiler.call(
            self.stage_key, *memory, *numbers, entries, done
        )
        return done

    def begin_output(self) -> tuple:
        """What a walk of layers gives its last program as `Programs.writes`."""
        return ()

    # ---- between steps

    def populate(self, rows: np.ndarray, versions: np.ndarray) -> None:
        """Copies experts of all layers into cells.

        - `rows`: int32[L, E], the arena row of each expert's cell; −1: it is not copied.
        - `versions`: int32[L, E], the version number in the cell.
        """
        buffers = self._buffers
        for layer, (row, version) in enumerate(zip(rows, versions, strict=True)):
            if np.any(row >= 0):
                places = np.int32(layer), row, version
                buffers.arena = self._compiler.call(
                    ProgramKey("populate"), buffers.arena, buffers.stores, *places
                )

    def drain(self) -> None:
        """Nothing flies into the arena any more when the steps to come begin, nor during what is
        dispatched next; experts that did not come are absent."""

    def failures(self, writes: int) -> list[TransferFailure]:
        """The experts that a step could not compute because their bytes did not come; what was
        computed beside them is wrong. Each is told once, and absent for the steps to come.

        - `writes`: of the step's Results.
        """
        return []

    def totals(self) -> Totals | None:
        """What the queue did so far; None: there is none."""
        return None

    def close(self) -> None:
        """Ends it, after the last step and before the store is freed."""


def link_use(totals: Totals | None) -> LinkUse:
    """A queue as policies and traces see it. totals: None: there is no queue."""
    if totals is None:
        return LinkUse()
    came, busy = totals.demands + totals.ahead, round(totals.busy_seconds * 1e6)
    return LinkUse(totals.flying, totals.bytes_left, came, totals.failed, busy)
