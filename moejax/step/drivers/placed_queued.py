"""A second processor beside a device with memory of its own: a GPU, or a CPU whose transfers jax
carries out (drivers/queued.py).

Missed experts that a policy gives it are computed by a CPU op from the pinned store, where they
lie; only rows of x and y cross. A layer, in the order of what the host does:

1. attend and route are dispatched, then the copy of x to the host,
2. policies decide, the host reads which of the given experts have no cell,
3. a thread waits for x and computes those, an expert after the other,
4. meanwhile the host plans, brings and dispatches the device's experts, as ever,
5. the thread's rows, copied to the device, are put into their slots of y, and y is summed in the
   fixed order.

Where the op has other bits than the device's, an expert's rows depend on who computed it: outputs
are a function of the placement, which traces record and RecordedPlacement repeats.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from host_offload.queue.pinned import PinnedRecords
from moejax.errors import UserError
from moejax.step.drivers.host import Parts
from moejax.step.drivers.placed import PlacementTotals, WithSecond, settled
from moejax.step.drivers.queued import QueuedRunner
from moejax.step.layer_programs import BESIDE_PARTS, EXPERT_PARTS, PUT, beside_program
from moejax.step.parts import Routing
from moejax.step.programs import ProgramKey
from moejax.step.runner import compiler_options

FEWEST = 4
"""Rows of the smallest program of the second processor; each next one has four times as many."""


class _Beside(NamedTuple):
    """What the second processor made of a layer."""

    rows: Sequence[jax.Array]
    """float32[PUT, D] each, on the device."""
    slots: Sequence[np.ndarray]
    """int32[PUT] each: where they belong in y [T·K, D]; T·K: nowhere."""
    ended: float


class _Layer(NamedTuple):
    """A layer that both were at work on, of which the device may not be done."""

    experts: int
    rows: int
    began: float
    device: Future
    """When it was done."""
    second: float


class PlacedQueuedRunner(WithSecond, QueuedRunner):
    """A QueuedRunner of StepSpec.second."""

    expert_parts = (*(part for part in EXPERT_PARTS if part != "plan"), *BESIDE_PARTS)

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        self._host = self.device if self.device.platform == "cpu" else _host_device()
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="moejax-watch")
        self._open: list[_Layer] = []
        self._elsewhere = np.zeros(0, bool), np.zeros(0, np.int32)
        """What is computed beside of the running layer, and the others' order."""
        self._ffn: dict[tuple[str, int | None, int], Future] = {}
        super()._compile_first(runs)
        if not isinstance(self.records, PinnedRecords):
            raise ValueError("a second processor reads the store's memory, not files")
        self._seen: dict[tuple[int, int], jax.Array] = {}
        self._check_view()
        for step in (*self._decodes(), ProgramKey("prefill")):
            for rows in self._sizes(self.programs().tokens(step)):
                self._compiled_ffn(step, rows)

    def _check_view(self) -> None:
        """Raises UserError where the store's memory cannot be computed with in place."""
        assert isinstance(self.records, PinnedRecords)
        try:
            view = np.asarray(self._record(0, 0))
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"placement computes experts where the store has them, and cannot: {error}; leave "
                "placement out"
            ) from error
        if not np.array_equal(view, np.asarray(self.records.of(0, 0)[0])):
            raise UserError(
                "placement computes experts where the store has them, and the CPU sees other bytes "
                "at the address of a pinned array; leave placement out"
            )

    def wait_compiled(self, everything: bool = False) -> None:
        super().wait_compiled(everything)
        for compiled in self._ffn.values():
            compiled.result()

    # ---- a layer's experts

    def _routing(self, normed: jax.Array) -> None:
        normed.copy_to_host_async()

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
        ids = np.asarray(routing.ids)
        rows, beside, order = self._given(parts, layer, ids)
        began, self._elsewhere = time.perf_counter(), (beside, order)
        self._note(began if layer else None)
        mine = np.flatnonzero(beside).tolist()
        other = self._thread.submit(self._compute, step, layer, mine, normed, ids) if mine else None
        try:
            y, counts = self._computed(parts, step, layer, normed, routing.ids)
            device = self._watcher.submit(_ended, parts["mark", None](y)) if mine else None
        finally:
            # A step that fails leaves nobody reading the store.
            result = None if other is None else settled(other)
        if result is not None and device is not None:
            made: _Beside = result()
            for part, slots in zip(made.rows, made.slots, strict=True):
                y = parts["put", None](y, part, slots)
            self._placed[layer] = beside
            given = len(mine), int(rows[mine].sum())
            self._open.append(_Layer(*given, began, device, made.ended))
        return parts["combine", None](x, y, routing.weights), counts

    def _plan(
        self, parts: Parts, counts: jax.Array, ids: jax.Array, layer: int, wave: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        self.tables, counts, seen = parts["plan_beside", None](
            self.tables, counts, ids, self._index[layer], wave, self._elsewhere[0]
        )
        return counts, seen

    def _in_turn(self, missing: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        return sorted(missing, key=lambda each: int(self._elsewhere[1][each[0]]))

    # ---- the second processor, in its thread

    def _compute(
        self, step: ProgramKey, layer: int, mine: Sequence[int], x: jax.Array, ids: np.ndarray
    ) -> _Beside:
        """The rows of some experts. x [T, D] and ids [T, K] of the layer."""
        seen, top_k = np.asarray(x), ids.shape[1]
        found: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for expert in mine:
            slots = np.flatnonzero(ids.ravel() == expert)
            size = next(n for n in self._sizes(len(ids)) if n >= len(slots))
            given = np.zeros((size, seen.shape[1]), seen.dtype)
            given[: len(slots)] = seen[slots // top_k]
            operands = jax.device_put((given, np.int32(len(slots))), self._host)
            run = self._compiled_ffn(step, size).result()
            made = run(operands[0], self._record(layer, expert), operands[1])
            found.append(np.asarray(made)[: len(slots)])
            places.append(slots)
        ended = time.perf_counter()
        at_once = min(PUT["decode" if step.kind == "decode" else "prefill"], ids.size)
        slots = np.concatenate(places).astype(np.int32)
        missing = -len(slots) % at_once
        # Each past the last is a slot of its own beyond y, since `put` is told that all differ.
        beyond = np.arange(ids.size, ids.size + missing, dtype=np.int32)
        slots = np.concatenate([slots, beyond]).reshape(-1, at_once)
        rows = np.concatenate([*found, np.zeros((missing, seen.shape[1]), np.float32)])
        parts = [*rows.reshape(*slots.shape, -1)]
        return _Beside(jax.device_put(parts, self._sharding), [*slots], ended)

    def _record(self, layer: int, expert: int) -> jax.Array:
        """An expert's record as the second processor sees it."""
        assert isinstance(self.records, PinnedRecords)
        key = layer, expert
        if key not in self._seen:
            self._seen[key] = self.records.seen_by(self._host, layer, expert)
        return self._seen[key]

    def _sizes(self, tokens: int) -> list[int]:
        """Rows that the second processor's programs are compiled for; an expert has at most as many
        as there are tokens."""
        sizes = [FEWEST]
        while sizes[-1] < tokens:
            sizes.append(sizes[-1] * 4)
        return sizes

    def _compiled_ffn(self, step: ProgramKey, rows: int) -> Future:
        kind = "decode" if step.kind == "decode" else "prefill"
        key = kind, step.rows if kind == "decode" else None, rows
        if key not in self._ffn:
            of_step = ProgramKey(kind, key[1])
            run = contextvars.copy_context().run
            self._ffn[key] = self._pool.submit(run, self._compile_ffn, of_step, rows)
        return self._ffn[key]

    def _compile_ffn(self, step: ProgramKey, rows: int) -> jax.stages.Compiled:
        program = beside_program(self.programs(), step, rows)
        place = jax.sharding.SingleDeviceSharding(self._host)
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in program.args]
        lowered = jax.jit(program.function).lower(*args)
        return lowered.compile(compiler_options=compiler_options("cpu"))

    # ---- what both took

    def _note(self, now: float | None = None) -> None:
        """Counts the layers that both are done with. now: when the experts of a layer that is not
        a step's first begin."""
        layers, self._open = self._open, []
        for layer in layers:
            ended = layer.device.result(), layer.second
            self._totals.add(layer.experts, layer.rows, layer.began, ended)
            self._ended = max(ended)
        if now is not None and self._ended is not None:
            self._totals.pass_between(max(now - self._ended, 0.0), now - self._routed_at)
        self._ended = None

    @property
    def placement_totals(self) -> PlacementTotals:
        self._note()
        return self._totals

    def delete(self, *, given: bool = True) -> None:
        self._watcher.shutdown(wait=True)
        self._seen.clear()
        super().delete(given=given)


def _host_device() -> jax.Device:
    """The CPU as a device of jax. Raises UserError where there is none."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "placement computes experts on jax's CPU device, which JAX_PLATFORMS leaves out; add "
            f"cpu to it ({error})"
        ) from error


def _ended(mark: jax.Array) -> float:
    """When what made it was done."""
    mark.block_until_ready()
    return time.perf_counter()
