"""A second processor: a CPU that computes missed experts from the store's host memory, beside the
device that has the arena (docs/explanation/prescope.md).

Only rows of x and y cross the link. Of each layer the host does, in this order:

1. It dispatches attend and route, then the copy of x to the host.
2. Policies choose experts for the CPU, and the host reads which of those have no cell.
3. A thread waits for x and computes them, one expert after the other.
4. Meanwhile the host plans, brings and dispatches the device's experts.
5. The thread's rows are copied to the device and put into their slots of y, and y is summed in the
   fixed order.

With `defer` (KTransformers' expert deferral), in decode steps step 5 does not wait for a token's
experts of least weight: their weighted rows are added to the residual stream after the next layer's
experts. The last layer's all come in time. Outputs then depend on the placement.

If both processors run the same implementation, the bits are those of full residency (contract 1).
If the CPU's op has other bits than the device's, an expert's rows depend on the processor that
computed them. Then outputs are a function of the placement, which traces record and
policies.recorded repeats.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from host_offload.queue.pinned import view_record
from moejax.errors import UserError
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler, compiler_options
from moejax.step.experts import Elsewhere
from moejax.step.layer_programs import PUT, beside_program
from moejax.step.programs import ProgramKey, Programs
from moejax.step.step_parts import Routing
from moejax.step.transports.transport import LayerInputs, Parts, Transport

FEWEST = 4
"""Rows of the smallest program of the second processor; each next one has four times as many."""


@dataclasses.dataclass
class PlacementTotals:
    """Counters of the second processor, over all steps so far."""

    layers: int = 0
    """Layers of which it computed experts."""
    experts: int = 0
    rows: int = 0
    deferred: int = 0
    """Rows that were added a layer later."""
    seconds: float = 0.0
    """Time in which it computed, without waiting for x."""


class _Beside(NamedTuple):
    """The second processor's rows of a layer."""

    rows: Sequence[jax.Array]
    """float32[PUT, D] each, on the device."""
    slots: Sequence[np.ndarray]
    """int32[PUT] each: their rows in y [T·K, D]; T·K and more: padding."""
    seconds: float


class Processor:
    """Computes the experts of a layer on both processors.

    - `device`: computes the device's share.
    - `programs`: makes the programs of the engine.
    - `steps`: the steps that the engine may run.
    - `defer`: see SecondProcessor.
    """

    def __init__(
        self,
        buffers: Buffers,
        compiler: Compiler,
        device: Transport,
        programs: Callable[[], Programs],
        steps: Iterable[ProgramKey],
        defer: int = 0,
    ):
        self._defer = defer
        self._deferred: Future[tuple[jax.Array, float]] | None = None
        """float32[T, D], what the layer before left to add."""
        self._buffers, self._compiler, self._device = buffers, compiler, device
        self._programs = programs
        names = "absent", "put", "combine", *(["defer"] if defer else [])
        own = ((part, None) for part in names)
        self.parts: Sequence[tuple[str, int | None]] = (*device.shared_parts, *own)
        self._records = [buffers.store.arrays[name] for name in buffers.stored]
        self._places = [buffers.store.places(name) for name in buffers.stored]
        cpu = buffers.device.platform == "cpu"
        self._host = buffers.device if cpu else _host_device()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moejax-second")
        self._ffn: dict[tuple[str, int | None, int, int], Future] = {}
        self._seen: dict[tuple[int, int, int], jax.Array] = {}
        self.totals = PlacementTotals()
        self._check_view()
        self.begin_step()
        for step in steps:
            for rows in self._sizes(programs().tokens(step)):
                for version in range(len(self._records)):
                    self._compiled_ffn(step, rows, version)

    def _check_view(self) -> None:
        """Raises UserError if the CPU cannot read the store's memory in place."""
        try:
            view = np.asarray(view_record(self._records[0], self._host, 0, 0))
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"placement computes experts where the store has them, and cannot: {error}; leave "
                "placement out"
            ) from error
        records = self._records[0]
        held = records[0, 0] if isinstance(records, jax.Array) else records.of(0, 0)[0]
        if not np.array_equal(view, np.asarray(held)):
            raise UserError(
                "placement computes experts where the store has them, and the CPU sees other bytes "
                "at the address of a pinned array; leave placement out"
            )

    # ---- what policies give it

    def begin_step(self) -> None:
        if self._deferred is not None:  # of a step that failed
            self._deferred.exception()
            self._deferred = None
        self._assigned: tuple[int, np.ndarray, np.ndarray] | None = None
        self.placed = np.zeros(self._buffers.tables.address.shape, bool)
        """bool[L, E]: experts that the second processor computed in the running step."""

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """Takes the experts of a layer that policies give to the second processor, see
        host_offload.control.control.Device."""
        self._assigned = layer, beside, order

    def _share(self, parts: Parts, layer: int, ids: np.ndarray) -> tuple[Elsewhere, dict[int, int]]:
        """Finds the second processor's share of a layer. Waits for the tables if a policy gave it
        experts.

        - `ids`: int[T, K], the layer's routing.

        Returns (the share, its experts with their version numbers).
        """
        experts = self.placed.shape[1]
        beside, order = np.zeros(experts, bool), np.zeros(experts, np.int32)
        mine: dict[int, int] = {}
        if self._assigned is not None and self._assigned[0] == layer:
            _, wanted, order = self._assigned
            # The device computes resident experts, also those that came since the policy chose.
            if np.any(wanted):
                number = self._buffers.numbers[layer]
                version = np.asarray(parts["absent", None](self._buffers.tables, number))
                beside = wanted & np.isin(np.arange(experts), ids) & (version >= 0)
                mine = {int(expert): int(version[expert]) for expert in np.flatnonzero(beside)}
        return Elsewhere(beside, order.astype(np.int32)), mine

    # ---- a layer

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Computes a layer's experts as Transport.compute does, on both processors."""
        step, layer, x, normed, routing = inputs
        ids = np.asarray(routing.ids)
        share, mine = self._share(parts, layer, ids)
        before, self._deferred = self._deferred, None
        later = self._put_off(step, layer, routing, mine)
        given = step, layer, mine, normed
        # −1 is no expert.
        other: Future[_Beside] | None = None
        if mine:
            other = self._thread.submit(self._compute, *given, np.where(later, -1, ids))
        if later.any():
            rest, weights = np.where(later, ids, -1), np.asarray(routing.weights)
            self._deferred = self._thread.submit(self._compute_later, *given, rest, weights)
        try:
            y, counts = self._device.compute_rows(parts, inputs, share)
            if before is not None:
                late, seconds = before.result()
                x = parts["defer", None](x, late)
                self.totals.seconds += seconds
        finally:  # after a failed step the thread must not read the store
            for begun in (before, other):
                if begun is not None:
                    begun.exception()
        if other is not None:
            made = other.result()
            for part, slots in zip(made.rows, made.slots, strict=True):
                y = parts["put", None](y, part, slots)
            self.placed[layer] = share.beside
            self.totals.layers += 1
            self.totals.experts += len(mine)
            self.totals.rows += int(np.isin(ids, [*mine]).sum())
            self.totals.deferred += int(later.sum())
            self.totals.seconds += made.seconds
        return parts["combine", None](x, y, routing.weights), counts

    def _put_off(
        self, step: ProgramKey, layer: int, routing: Routing, mine: Mapping[int, int]
    ) -> np.ndarray:
        """Returns bool[T, K]: choices of experts of `mine` that are added a layer later, those of
        least weight; of equal ones those of higher slots."""
        ids = np.asarray(routing.ids)
        found = np.zeros(ids.shape, bool)
        if self._defer and step.kind == "decode" and layer < len(self.placed) - 1:
            order = np.argsort(-np.asarray(routing.weights), axis=1, kind="stable")
            first = max(ids.shape[1] - self._defer, 0)
            np.put_along_axis(found, order[:, first:], True, axis=1)
            found &= np.isin(ids, [*mine])
        return found

    def _compute_later(
        self,
        step: ProgramKey,
        layer: int,
        mine: Mapping[int, int],
        x: jax.Array,
        ids: np.ndarray,
        weights: np.ndarray,
    ) -> tuple[jax.Array, float]:
        """Computes experts as _compute_rows does. Returns float32[T, D] on the device, each token's
        weighted sum in the order of ids, and the seconds of computing.

        - `weights`: float32[T, K].
        """
        rows, slots, seconds = self._compute_rows(step, layer, mine, x, ids)
        total = np.zeros((len(ids), rows.shape[1]), np.float32)
        np.add.at(total, slots // ids.shape[1], weights.ravel()[slots, None] * rows)
        return jax.device_put(total, self._buffers.sharding), seconds

    def _compute(
        self, step: ProgramKey, layer: int, mine: Mapping[int, int], x: jax.Array, ids: np.ndarray
    ) -> _Beside:
        """Computes experts as _compute_rows does. Returns the rows on the device."""
        rows, slots, seconds = self._compute_rows(step, layer, mine, x, ids)
        at_once = min(PUT["decode" if step.kind == "decode" else "prefill"], ids.size)
        missing = -len(slots) % at_once
        # Every padding row has a slot of its own beyond y, since `put` asserts unique indices.
        beyond = np.arange(ids.size, ids.size + missing, dtype=np.int32)
        slots = np.concatenate([slots, beyond]).reshape(-1, at_once)
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.float32)])
        parts = [*rows.reshape(*slots.shape, rows.shape[1])]
        return _Beside(jax.device_put(parts, self._buffers.sharding), [*slots], seconds)

    def _compute_rows(
        self, step: ProgramKey, layer: int, mine: Mapping[int, int], x: jax.Array, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Computes experts of a layer, in the processor's thread.

        - `mine`: version number by expert, ascending.
        - `x`: [T, D], input of the layer's experts.
        - `ids`: int[T, K].

        Returns (float32[N, D] rows, int32[N] their slots in y, seconds).
        """
        seen, top_k = np.asarray(x), ids.shape[1]
        began = time.perf_counter()
        found = [np.zeros((0, seen.shape[1]), np.float32)]
        places = [np.zeros(0, np.int64)]
        for expert, version in mine.items():
            slots = np.flatnonzero(ids.ravel() == expert)
            if not len(slots):
                continue
            size = next(n for n in self._sizes(len(ids)) if n >= len(slots))
            given = np.zeros((size, seen.shape[1]), seen.dtype)
            given[: len(slots)] = seen[slots // top_k]
            operands = jax.device_put((given, np.int32(len(slots))), self._host)
            run = self._compiled_ffn(step, size, version).result()
            made = run(operands[0], self._record(layer, expert, version), operands[1])
            found.append(np.asarray(made)[: len(slots)])
            places.append(slots)
        seconds = time.perf_counter() - began
        return np.concatenate(found), np.concatenate(places).astype(np.int32), seconds

    def _record(self, layer: int, expert: int, version: int) -> jax.Array:
        """Returns an expert's record as an array of the CPU device."""
        key = layer, expert, version
        if key not in self._seen:
            places = self._places[version]
            place = layer if places is None else places[layer]
            self._seen[key] = view_record(self._records[version], self._host, place, expert)
        return self._seen[key]

    # ---- its programs

    def _sizes(self, tokens: int) -> list[int]:
        """Returns the row counts that programs are compiled for. An expert has at most as many rows
        as there are tokens."""
        sizes = [FEWEST]
        while sizes[-1] < tokens:
            sizes.append(sizes[-1] * 4)
        return sizes

    def _compiled_ffn(self, step: ProgramKey, rows: int, version: int) -> Future:
        kind = "decode" if step.kind == "decode" else "prefill"
        key = kind, step.rows if kind == "decode" else None, rows, version
        if key not in self._ffn:
            of_step = ProgramKey(kind, key[1])
            self._ffn[key] = self._compiler.submit(self._compile_ffn, of_step, rows, version)
        return self._ffn[key]

    def _compile_ffn(self, step: ProgramKey, rows: int, version: int) -> jax.stages.Compiled:
        program = beside_program(self._programs(), step, rows, version)
        place = jax.sharding.SingleDeviceSharding(self._host)
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in program.args]
        lowered = jax.jit(program.function).lower(*args)
        return lowered.compile(compiler_options=compiler_options("cpu"))

    def wait(self) -> None:
        """Blocks until the second processor's programs are compiled."""
        for compiled in self._ffn.values():
            compiled.result()

    def stop(self) -> None:
        """Ends the thread. Call it before buffers are freed."""
        self._thread.shutdown(wait=True)
        self._seen.clear()


def _host_device() -> jax.Device:
    """Returns jax's CPU device. Raises UserError if there is none."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "placement computes experts on jax's CPU device, which JAX_PLATFORMS leaves out; add "
            f"cpu to it ({error})"
        ) from error
