"""A second processor that reads the store as its own, its memory or by a queue its files: missed
experts that a policy gives it are computed from the store in place, by a program of its own in a
thread of its own, while the device loads and computes the others.

A layer's slots y[T, K, D] are taken from the processor that computed the expert and summed as ever.
So where both processors run the same implementation, the bits are those of full residency
(contract 1).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np

from host_offload.memory.arena import own_arena
from host_offload.queue.native import NativeQueue
from moejax.step.buffers import Buffers
from moejax.step.experts import Elsewhere
from moejax.step.layer_programs import PLACED_PARTS
from moejax.step.processors.processor import (
    Assignments,
    LayerInputs,
    Parts,
    PlacementTotals,
    settled,
)
from moejax.step.step_parts import StepSpec
from moejax.step.transports.native import join_queue
from pallas_kernels.cpu.arena import ArenaMemory, OwnedArena, TransferFailure


class Clock(Protocol):
    """When the processors are done."""

    def is_timed(self, beside: int) -> bool:
        """Whether a layer's experts are waited for, of which so many are computed beside."""
        ...

    def attend(self, ended: float) -> None:
        """Both were done with a layer's experts at `ended`; the next layer's routing is there."""
        ...

    def accelerated(self, began: float, experts: int) -> float:
        """When the accelerator, which is done with so many experts of a layer, was done."""
        ...

    def computed_beside(self, began: float, experts: int, rows: int) -> float:
        """As `accelerated` of the second processor, in its thread."""
        ...


class WallClock:
    """A Clock: they are done when they are."""

    def is_timed(self, beside: int) -> bool:
        return beside > 0

    def attend(self, ended: float) -> None:
        pass

    def accelerated(self, began: float, experts: int) -> float:
        return time.perf_counter()

    def computed_beside(self, began: float, experts: int, rows: int) -> float:
        return time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Reader:
    """What brings records in files to the second processor: a queue of its own, through buffers
    that only the expert op has, so that neither processor waits for what the other reads."""

    memory: ArenaMemory
    queue: NativeQueue
    arena: OwnedArena
    """Without cells."""
    failed: list[tuple[int, TransferFailure]]
    """With the writes of the steps' arena at that time."""

    def look(self, arena: OwnedArena) -> None:
        """What failed in a layer that both are done with. arena: the steps'."""
        if failures := self.memory.failures(0):
            writes = int(np.asarray(arena.token)[1])
            self.failed.extend((writes, failure) for failure in failures)

    def failures(self, writes: int) -> list[TransferFailure]:
        """As of Transport."""
        due = [(since, f) for since, f in self.failed if (writes - since) % 2**32 < 2**31]
        self.failed[:] = [entry for entry in self.failed if entry not in due]
        return [failure for _, failure in due]

    def close(self) -> None:
        """Nobody computes."""
        self.arena.token.delete()
        self.queue.close()
        self.memory.close()


def open_reader(steps: StepSpec, buffers: Buffers) -> Reader | None:
    """None where the store is memory."""
    if not buffers.store.files:
        return None
    assert steps.queue is not None
    # It reads beside the link, whose rate is of what comes into cells.
    wanted = dataclasses.replace(steps.queue, rate=0.0, latency=0.0)
    memory = own_arena(1, steps.layout.hidden)
    queue = join_queue(memory, wanted, buffers)
    return Reader(memory, queue, memory.on(buffers.device), [])


class InPlaceProcessor:
    """A Processor, and the ExpertDispatch of both."""

    parts: Sequence[str] = PLACED_PARTS

    def __init__(self, steps: StepSpec, buffers: Buffers, clock: Clock):
        self._buffers, self._clock = buffers, clock
        self.assignments, self.totals = Assignments(buffers), PlacementTotals()
        self._reader = open_reader(steps, buffers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moejax-second")
        self._ended: float | None = None
        """When both were done with the last layer's experts; None: nobody looked."""
        self._routed_at = 0.0

    def begin_step(self) -> None:
        self._ended = None
        self.assignments.begin_step()

    def dispatch_routing(self, normed: jax.Array) -> None:
        pass

    def see_routing(self) -> None:
        if self._ended is not None:
            self._clock.attend(self._ended)
        self._routed_at = time.perf_counter()

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """As of ExpertDispatch."""
        _, layer, x, normed, routing = inputs
        buffers, totals = self._buffers, self.totals
        share = self.assignments.share(parts, layer, np.asarray(routing.ids))
        index, beside = buffers.numbers[layer], share.beside
        mine, row_count = share.experts, share.row_count
        began = time.perf_counter()
        if self._ended is not None:
            totals.pass_between(began - self._ended, began - self._routed_at)
        other = self._begin(parts, normed, routing.ids, index, mine, row_count) if mine else None
        try:
            y, buffers.arena, buffers.tables, counts = parts["accelerate", None](
                *(buffers.stores, buffers.arena, buffers.tables, normed, routing.ids, index),
                Elsewhere._make([beside, share.order]),
            )
            if not self._clock.is_timed(len(mine)):
                self._ended = None
                return parts["combine", None](x, y, routing.weights), counts
            y.block_until_ready()
            here = int(np.count_nonzero(share.rows)) - len(mine)
            self._ended = ended = self._clock.accelerated(began, here)
        finally:
            # A step that fails leaves nobody reading the store.
            result = None if other is None else settled(other)
        if result is None:
            return parts["combine", None](x, y, routing.weights), counts
        computed, second_ended = result()
        if self._reader is not None:
            self._reader.look(buffers.arena)
        self._ended, self.assignments.placed[layer] = max(ended, second_ended), beside
        totals.add(len(mine), row_count, began, (ended, second_ended))
        x = parts["join", None](x, y, computed, routing.ids, beside, routing.weights)
        return x, counts

    def _begin(
        self,
        parts: Parts,
        x: jax.Array,
        ids: jax.Array,
        index: jax.Array,
        mine: Sequence[int],
        rows: int,
    ) -> Future:
        """(y of those experts, when they were done) to come."""
        listed = np.full(self.assignments.placed.shape[1], -1, np.int32)
        listed[: len(mine)] = mine
        count = np.int32(len(mine))
        reader = None if self._reader is None else self._reader.arena

        def compute() -> tuple[jax.Array, float]:
            began = time.perf_counter()
            y = parts["beside", None](self._buffers.stores, reader, x, ids, index, listed, count)
            y.block_until_ready()
            return y, self._clock.computed_beside(began, len(mine), rows)

        return self._thread.submit(compute)

    def failures(self, writes: int) -> list[TransferFailure]:
        return [] if self._reader is None else self._reader.failures(writes)

    def wait(self) -> None:
        pass

    def stop(self) -> None:
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
