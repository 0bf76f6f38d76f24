"""The host driver with a second processor: missed experts that a policy gives it are computed from
the store in place, by a program of its own in a thread of its own, while the device loads and
computes the others.

A layer's slots y[T, K, D] are taken from whoever computed the expert and summed as ever. So where
both processors run the same implementation, the bits are those of full residency (contract 1).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from host_offload.memory.arena import own_arena
from host_offload.queue.native import NativeQueue
from moejax.step.drivers.host import HostRunner, Parts
from moejax.step.experts import Elsewhere
from moejax.step.hooks import Hooks
from moejax.step.layer_programs import PLACED_PARTS
from moejax.step.parts import Routing, StepOutput
from moejax.step.programs import ProgramKey
from pallas_kernels.cpu.arena import ArenaMemory, OwnedArena, TransferFailure
from pallas_kernels.stage import Entries


@dataclasses.dataclass
class PlacementTotals:
    """What both processors did so far. Seconds are from when a layer's experts begin on both."""

    layers: int = 0
    """Those in which the second processor had experts, in all steps."""
    experts: int = 0
    rows: int = 0
    """What they computed."""
    accelerator_s: float = 0.0
    """Until the accelerator was done, in those layers."""
    second_s: float = 0.0
    """Until the second processor was."""
    both_s: float = 0.0
    """While both were at work."""
    gap_s: float = 0.0
    """From when one was done to when the other was."""
    most_gap_s: float = 0.0
    between: int = 0
    """Pairs of layers, one after the other in a step, and below what passed between them."""
    between_s: float = 0.0
    """From when both were done to when the next layer's experts began."""
    decided_s: float = 0.0
    """The part of it in which policies were asked, and both were told."""

    def add(self, experts: int, rows: int, began: float, ended: tuple[float, float]) -> None:
        """A layer. ended: when the accelerator and the second processor were done."""
        accelerator, second = (end - began for end in ended)
        gap = abs(accelerator - second)
        self.layers += 1
        self.experts += experts
        self.rows += rows
        self.accelerator_s += accelerator
        self.second_s += second
        self.both_s += min(accelerator, second)
        self.gap_s += gap
        self.most_gap_s = max(self.most_gap_s, gap)

    def pass_between(self, passed: float, decided: float) -> None:
        """Two layers, one after the other, in seconds."""
        self.between += 1
        self.between_s += passed
        self.decided_s += decided


class WithSecond(HostRunner):
    """What the runners of StepSpec.second share: who was given what, and who computed what."""

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moejax-second")
        self._assigned: tuple[int, np.ndarray, np.ndarray] | None = None
        self._placed = self._nothing_placed()
        self._totals = PlacementTotals()
        self._ended: float | None = None
        """When both were done with the last layer's experts; None: nobody looked."""
        self._routed_at = 0.0
        super()._compile_first(runs)

    @property
    def placement_totals(self) -> PlacementTotals:
        return self._totals

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """As of host_offload.control.control.Device."""
        self._assigned = layer, beside, order

    def _nothing_placed(self) -> np.ndarray:
        return np.zeros((sum(self.config.moe_layers), self.config.num_experts), bool)

    def _step(
        self,
        step: ProgramKey,
        args: tuple,
        forced: Routing | None,
        stages: Entries | None,
        hooks: Hooks | None,
    ) -> StepOutput:
        self._assigned, self._placed, self._ended = None, self._nothing_placed(), None
        output = super()._step(step, args, forced, stages, hooks)
        return output._replace(placed=self._placed)

    def _given(
        self, parts: Parts, layer: int, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(int[E] rows of each expert of the layer; bool[E] those that the second processor
        computes; int32[E] the others' order). Waits for the tables where it was given any."""
        experts = self._placed.shape[1]
        rows = np.bincount(ids.ravel(), minlength=experts + 1)[:experts]
        beside, order = np.zeros(experts, bool), np.zeros(experts, np.int32)
        if self._assigned is not None and self._assigned[0] == layer:
            _, wanted, order = self._assigned
            # What is resident stays where it is, also what came since the policy looked.
            if np.any(wanted):
                absent = parts["absent", None](self.tables, self._index[layer])
                beside = wanted & (rows > 0) & np.asarray(absent)
        return rows, beside, order.astype(np.int32)

    def delete(self, *, given: bool = True) -> None:
        self._thread.shutdown(wait=True)
        super().delete(given=given)


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
        """As Runner.failures."""
        due = [(since, f) for since, f in self.failed if (writes - since) % 2**32 < 2**31]
        self.failed[:] = [entry for entry in self.failed if entry not in due]
        return [failure for _, failure in due]

    def close(self) -> None:
        """Nobody computes."""
        self.arena.token.delete()
        self.queue.close()
        self.memory.close()


class PlacedRunner(WithSecond):
    """Both processors read the store as their own: its memory, or each by a queue its files."""

    expert_parts = PLACED_PARTS

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        self._reader: Reader | None = None
        if self.store.files:
            assert self.steps.queue is not None
            # It reads beside the link, whose rate is of what comes into cells.
            wanted = dataclasses.replace(self.steps.queue, rate=0.0, latency=0.0)
            memory = own_arena(1, self.layout.hidden)
            queue = self._joined(memory, wanted, sum(self.config.moe_layers))
            self._reader = Reader(memory, queue, memory.on(self.device), [])
        super()._compile_first(runs)

    def failures(self, writes: int) -> list[TransferFailure]:
        failed = super().failures(writes)
        if self._reader is not None:
            failed += self._reader.failures(writes)
        return failed

    def delete(self, *, given: bool = True) -> None:
        super().delete(given=given)
        if self._reader is not None:
            self._reader.close()

    def _routed(self) -> None:
        self._routed_at = time.perf_counter()

    def _experts(
        self,
        parts: Parts,
        step: ProgramKey,
        layer: int,
        x: jax.Array,
        normed: jax.Array,
        routing: Routing,
    ) -> tuple[jax.Array, jax.Array]:
        rows, beside, order = self._given(parts, layer, np.asarray(routing.ids))
        index = self._index[layer]
        mine, totals = np.flatnonzero(beside), self._totals
        began = time.perf_counter()
        if self._ended is not None:
            totals.pass_between(began - self._ended, began - self._routed_at)
        other = self._beside(parts, normed, routing.ids, index, mine, int(rows[mine].sum()))
        try:
            y, self.arena, self.tables, counts = parts["accelerate", None](
                *(self.stores, self.arena, self.tables, normed, routing.ids, index),
                Elsewhere._make([beside, order]),
            )
            if not self._is_timed(len(mine)):
                self._ended = None
                return parts["combine", None](x, y, routing.weights), counts
            y.block_until_ready()
            here = int(np.count_nonzero(rows)) - len(mine)
            self._ended = ended = self._accelerated(began, here)
        finally:
            # A step that fails leaves nobody reading the store.
            result = None if other is None else settled(other)
        if result is None:
            return parts["combine", None](x, y, routing.weights), counts
        computed, second_ended = result()
        if self._reader is not None:
            self._reader.look(self.arena)
        self._ended, self._placed[layer] = max(ended, second_ended), beside
        totals.add(len(mine), int(rows[mine].sum()), began, (ended, second_ended))
        x = parts["join", None](x, y, computed, routing.ids, beside, routing.weights)
        return x, counts

    def _beside(
        self, parts: Parts, x: jax.Array, ids: jax.Array, index: jax.Array, mine: Any, rows: int
    ) -> Future | None:
        """(y of those experts, when they were done) to come; None where there are none."""
        if not len(mine):
            return None
        listed = np.full(self._placed.shape[1], -1, np.int32)
        listed[: len(mine)] = mine
        count = np.int32(len(mine))
        reader = None if self._reader is None else self._reader.arena

        def compute() -> tuple[jax.Array, float]:
            began = time.perf_counter()
            y = parts["beside", None](self.stores, reader, x, ids, index, listed, count)
            y.block_until_ready()
            return y, self._computed_beside(began, len(mine), rows)

        return self._thread.submit(compute)

    def _is_timed(self, beside: int) -> bool:
        """Whether a layer's experts are waited for, of which so many are computed beside."""
        return beside > 0

    def _accelerated(self, began: float, experts: int) -> float:
        """When the accelerator, which is done with so many experts of a layer, was done."""
        return time.perf_counter()

    def _computed_beside(self, began: float, experts: int, rows: int) -> float:
        """As _accelerated of the second processor, in its thread."""
        return time.perf_counter()


def settled(future: Future) -> Callable[[], Any]:
    """Waits for it; what gives its result or raises what it raised."""
    future.exception()
    return future.result
