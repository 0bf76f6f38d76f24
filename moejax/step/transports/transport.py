"""How experts that a step misses come into their cells, as the executor sees it."""

from __future__ import annotations

from typing import Protocol

import jax

from host_offload.queue.native import NativeQueue, Totals
from host_offload.queue.transfer import Progress, QueueSpec
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.programs import ProgramKey
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.stage import Entries

STAGE = ProgramKey("stage")


class Transport(Protocol):
    """Brings experts of the store into cells of the arena."""

    @property
    def spec(self) -> QueueSpec | None:
        """The queue as it is; None: ops copy experts within the step."""
        ...

    @property
    def queue(self) -> NativeQueue | None:
        """The native library's queue, where that library carries transfers out."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Device memory of records on their way, beside what programs take."""
        ...

    stage_key: ProgramKey
    """The program by which a walk of layers carries out a layer's part of a stage list."""

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        """Carries out a layer's part of a stage list; returns `done` with the entries that were.

        - `done`: int32[STAGES], 1 for each entry that was carried out so far.
        - `ahead`: before the layer's plan, as of `experts.stage_layer`.
        """
        ...

    def begin_output(self) -> tuple:
        """What a walk of layers gives its last program as `Programs.writes`."""
        ...

    def drain(self) -> None:
        """Nothing flies into the arena any more when the steps to come begin, nor during what is
        dispatched next; experts that did not come are absent."""
        ...

    def failures(self, writes: int) -> list[TransferFailure]:
        """The experts that a step could not compute because their bytes did not come; what was
        computed beside them is wrong. Each is told once, and absent for the steps to come.

        - `writes`: of the step's Results.
        """
        ...

    def totals(self) -> Totals | None:
        """What the queue did so far; None: there is none."""
        ...

    def keep_settled(self, keep: bool) -> None:
        """Whether transfers that settle from now on are kept until `progress` tells of them."""
        ...

    def progress(self) -> Progress:
        """What is on its way now, and what has settled since the last call, where that is kept."""
        ...

    def faults(self) -> list[str]:
        """Cells with other bytes than the store's, where the program `integrity` cannot see it."""
        ...

    def close(self) -> None:
        """Ends it, after the last step and before the store is freed."""
        ...


class InStepTransport:
    """Ops copy experts where they need them, within the step: nothing is ever on its way."""

    spec = queue = None
    staging_bytes = 0
    stage_key = STAGE

    def __init__(self, buffers: Buffers, compiler: Compiler):
        self._buffers, self._compiler = buffers, compiler

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        return stage_in_step(self._buffers, self._compiler, layer, entries, done, ahead)

    def begin_output(self) -> tuple:
        return ()

    def drain(self) -> None:
        pass

    def failures(self, writes: int) -> list[TransferFailure]:
        return []

    def totals(self) -> Totals | None:
        return None

    def keep_settled(self, keep: bool) -> None:
        pass

    def progress(self) -> Progress:
        return Progress(0.0, (), ())

    def faults(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def stage_in_step(
    buffers: Buffers,
    compiler: Compiler,
    layer: int,
    entries: Entries,
    done: jax.Array,
    ahead: bool,
) -> jax.Array:
    """As Transport.stage, by the ops of steps."""
    memory = buffers.arena, buffers.tables, buffers.stores
    numbers = buffers.numbers[layer], buffers.numbers[int(ahead)]
    buffers.arena, buffers.tables, done = compiler.call(STAGE, *memory, *numbers, entries, done)
    return done
