"""The native library's queue fills an arena that the library owns, beside compute."""

from __future__ import annotations

import jax

from host_offload.memory.record_source import locate_records
from host_offload.queue.native import NativeQueue, Totals
from host_offload.queue.transfer import Progress, QueueSpec
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import StepSpec
from moejax.step.transports.transport import STAGE, stage_in_step
from pallas_kernels.cpu.arena import ArenaMemory, TransferFailure
from pallas_kernels.stage import Entries


class NativeTransport:
    """A Transport. Raises ValueError where XLA owns the arena, or records are decoded on the way.

    - `spec`: the queue as it will be.
    """

    staging_bytes = 0
    stage_key = STAGE

    def __init__(self, spec: QueueSpec, steps: StepSpec, buffers: Buffers, compiler: Compiler):
        if buffers.memory is None:
            raise ValueError("a queue of transfers needs an arena that the native CPU ops own")
        if steps.formats is not None and any(version.in_transit for version in steps.formats):
            raise ValueError("a queue of transfers does not decode on the way")
        self.spec, self._buffers, self._memory = spec, buffers, buffers.memory
        self.queue = join_queue(self._memory, spec, buffers)
        self._compiler = compiler
        compiler.need(ProgramKey("drain"))

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        return stage_in_step(self._buffers, self._compiler, layer, entries, done, ahead)

    def begin_output(self) -> tuple:
        return (self._buffers.arena.token,)

    def drain(self) -> None:
        buffers = self._buffers
        drained = self._compiler.call(ProgramKey("drain"), buffers.arena, buffers.tables)
        buffers.arena, buffers.tables = drained

    def failures(self, writes: int) -> list[TransferFailure]:
        failed = self._memory.failures(writes)
        if failed:
            self.drain()
        return failed

    def totals(self) -> Totals:
        return self.queue.totals()

    def keep_settled(self, keep: bool) -> None:
        self.queue.keep_settled(keep)

    def progress(self) -> Progress:
        return self.queue.observe()

    def faults(self) -> list[str]:
        return []

    def close(self) -> None:
        self.queue.close()


def join_queue(memory: ArenaMemory, spec: QueueSpec, buffers: Buffers) -> NativeQueue:
    """A queue from the store into an owned arena.

    - `memory`: of the arena, the steps' or another one.
    - `buffers`: whose store it is.
    """
    store, stored = buffers.store, buffers.stored
    queue = NativeQueue(
        threads=spec.threads, chunk_bytes=spec.chunk_bytes, rate=spec.rate, latency=spec.latency
    )
    queue.keep_settled(False)
    sources = locate_records(
        [store.versions[version].source for version in stored],
        [*map(store.places, stored)],
        buffers.tables.address.shape[0],
        queue.file_number,
    )
    ahead = queue.cause_number("prefetch")
    memory.attach(queue.handle, sources, ahead=ahead, buffers=spec.buffers)
    return queue
