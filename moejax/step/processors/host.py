"""A second processor beside a device with memory of its own: a GPU, or a CPU whose transfers jax
carries out (transports/copies.py).

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

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from host_offload.queue.pinned import PinnedRecords
from moejax.errors import UserError
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler, compiler_options
from moejax.step.layer_experts import CopiedExperts
from moejax.step.layer_programs import BESIDE_PARTS, EXPERT_PARTS, PUT, beside_program
from moejax.step.processors.processor import (
    Assignments,
    LayerInputs,
    Parts,
    PlacementTotals,
    settled,
)
from moejax.step.programs import ProgramKey, Programs
from pallas_kernels.cpu.arena import TransferFailure

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


class HostProcessor:
    """A Processor, and the ExpertDispatch of both.

    - `device`: computes the experts that the second processor does not.
    - `records`: of the store.
    - `steps`: that the engine may run.
    """

    parts: Sequence[str] = (*(part for part in EXPERT_PARTS if part != "plan"), *BESIDE_PARTS)

    def __init__(
        self,
        buffers: Buffers,
        compiler: Compiler,
        device: CopiedExperts,
        records: object,
        programs: Callable[[], Programs],
        steps: Iterable[ProgramKey],
    ):
        if not isinstance(records, PinnedRecords):
            raise ValueError("a second processor reads the store's memory, not files")
        self._buffers, self._compiler, self._device = buffers, compiler, device
        self._records, self._programs = records, programs
        cpu = buffers.device.platform == "cpu"
        self._host = buffers.device if cpu else _host_device()
        self.assignments, self._totals = Assignments(buffers), PlacementTotals()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moejax-second")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="moejax-watch")
        self._open: list[_Layer] = []
        self._ended: float | None = None
        """When both were done with the last layer's experts; None: nobody looked."""
        self._routed_at = 0.0
        self._ffn: dict[tuple[str, int | None, int], Future] = {}
        self._seen: dict[tuple[int, int], jax.Array] = {}
        self._check_view()
        for step in steps:
            for rows in self._sizes(programs().tokens(step)):
                self._compiled_ffn(step, rows)

    def _check_view(self) -> None:
        """Raises UserError where the store's memory cannot be computed with in place."""
        try:
            view = np.asarray(self._record(0, 0))
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"placement computes experts where the store has them, and cannot: {error}; leave "
                "placement out"
            ) from error
        if not np.array_equal(view, np.asarray(self._records.of(0, 0)[0])):
            raise UserError(
                "placement computes experts where the store has them, and the CPU sees other bytes "
                "at the address of a pinned array; leave placement out"
            )

    def begin_step(self) -> None:
        self._ended = None
        self.assignments.begin_step()

    def dispatch_routing(self, normed: jax.Array) -> None:
        normed.copy_to_host_async()

    def see_routing(self) -> None:
        self._routed_at = time.perf_counter()

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """As of ExpertDispatch."""
        step, layer, x, normed, routing = inputs
        ids = np.asarray(routing.ids)
        share = self.assignments.share(parts, layer, ids)
        began = time.perf_counter()
        self._note(began if layer else None)
        mine = share.experts
        other = self._thread.submit(self._compute, step, layer, mine, normed, ids) if mine else None
        try:
            y, counts = self._device.compute_rows(parts, inputs, share)
            device = self._watcher.submit(_ended, parts["mark", None](y)) if mine else None
        finally:
            # A step that fails leaves nobody reading the store.
            result = None if other is None else settled(other)
        if result is not None and device is not None:
            made: _Beside = result()
            for part, slots in zip(made.rows, made.slots, strict=True):
                y = parts["put", None](y, part, slots)
            self.assignments.placed[layer] = share.beside
            self._open.append(_Layer(len(mine), share.row_count, began, device, made.ended))
        return parts["combine", None](x, y, routing.weights), counts

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
        return _Beside(jax.device_put(parts, self._buffers.sharding), [*slots], ended)

    def _record(self, layer: int, expert: int) -> jax.Array:
        """An expert's record as the second processor sees it."""
        key = layer, expert
        if key not in self._seen:
            self._seen[key] = self._records.seen_by(self._host, layer, expert)
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
            self._ffn[key] = self._compiler.submit(self._compile_ffn, of_step, rows)
        return self._ffn[key]

    def _compile_ffn(self, step: ProgramKey, rows: int) -> jax.stages.Compiled:
        program = beside_program(self._programs(), step, rows)
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
    def totals(self) -> PlacementTotals:
        self._note()
        return self._totals

    def failures(self, writes: int) -> list[TransferFailure]:
        return []

    def wait(self) -> None:
        for compiled in self._ffn.values():
            compiled.result()

    def stop(self) -> None:
        self._thread.shutdown(wait=True)
        self._watcher.shutdown(wait=True)
        self._seen.clear()

    def close(self) -> None:
        pass


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
