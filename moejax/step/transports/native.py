"""Fills an arena that the native library owns, by the library's queue, beside compute."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from host_offload.memory.record_source import locate_records
from host_offload.memory.tables import Copy
from host_offload.queue.native import NativeQueue, Totals
from host_offload.queue.transfer import Load, QueueError, Source, Transfer
from moejax.errors import UserError
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import StepSpec
from moejax.step.transports.transport import Transport
from pallas_kernels.cpu.arena import TransferFailure


class NativeTransport(Transport):
    """Brings experts by the native library's queue.

    Raises ValueError if XLA owns the arena, or if records are decoded on the way.
    """

    queue: NativeQueue

    @classmethod
    def serves(cls, steps: StepSpec) -> bool:
        return steps.queue is not None and steps.owned

    def __init__(self, steps: StepSpec, buffers: Buffers, compiler: Compiler):
        super().__init__(steps, buffers, compiler)
        memory, spec = buffers.memory, steps.queue
        if memory is None or spec is None:
            raise ValueError("a queue of transfers needs an arena that the native CPU ops own")
        if steps.formats is not None and any(version.in_transit for version in steps.formats):
            raise ValueError("a queue of transfers does not decode on the way")
        self.spec, self._memory = spec, memory
        self.queue = NativeQueue(
            threads=spec.threads, chunk_bytes=spec.chunk_bytes, rate=spec.rate, latency=spec.latency
        )
        self.queue.keep_settled(False)
        store, stored = buffers.store, buffers.stored
        try:
            sources = locate_records(
                [store.versions[version].source for version in stored],
                [*map(store.places, stored)],
                buffers.tables.address.shape[0],
                self.queue.file_number,
            )
        except QueueError as error:  # a file is gone, or does not answer
            self.queue.close()
            raise UserError(str(error)) from None
        self._copies: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        """(layer, expert) → ticket of begin_copies, and int32[1] that its last byte makes 1."""
        self._in_files = any(store.versions[version].source.first_file for version in stored)
        ahead = self.queue.cause_number("prefetch")
        memory.attach(self.queue.handle, sources, ahead=ahead, buffers=spec.buffers)
        compiler.need(ProgramKey("drain"))

    def begin_output(self) -> tuple:
        return (self._buffers.arena.token,)

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Does as Transport.begin_copies. First it waits for the programs so far: whatever had
        these rows before, none of them can still read or write there."""
        jax.block_until_ready((self._buffers.arena, self._buffers.tables))
        sources, row_bytes = self._memory.sources, 2 * self._memory.hidden
        assert sources is not None and not self._in_files
        for layer, expert, version, row in copies:
            there = np.zeros(1, np.int32)
            ticket = self.queue.submit(
                Transfer(layer, expert, version, row, "transition"),
                Load(
                    sources.parts[version],
                    Source(int(sources.records[version, layer, expert]["place"][0])),
                    self._memory.address + row * row_bytes,
                    there.ctypes.data,
                    1,
                ),
            )
            self._copies[layer, expert] = ticket, there

    def ended_copies(self) -> dict[tuple[int, int], bool]:
        flying = {each.ticket for each in self.queue.observe().flying}
        ended = {p: bool(there[0]) for p, (t, there) in self._copies.items() if t not in flying}
        for place in ended:
            del self._copies[place]
        return ended

    def drain(self) -> None:
        self._drain()
        if self._in_files:  # before anything else gets the memory of cells
            jax.block_until_ready(self._buffers.tables)
            self.queue.require_answers()

    def _drain(self) -> None:
        buffers = self._buffers
        drained = self._compiler.call(ProgramKey("drain"), buffers.arena, buffers.tables)
        buffers.arena, buffers.tables = drained

    def failures(self, writes: int) -> list[TransferFailure]:
        failed = self._memory.failures(writes)
        if failed:
            self._drain()
        return failed

    def totals(self) -> Totals:
        return self.queue.totals()

    def close(self) -> None:
        self.queue.close()
