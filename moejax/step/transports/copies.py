"""jax's own copies bring experts out of separate pinned arrays, beside compute, where the library
does not own the arena: GPUs, and ops that are not native.

Tables say at once where an expert will be, so what is decided never depends on how fast a copy was,
and a run can be replayed. No program that computes an expert is dispatched before the one that
reads its record into its cell: that, and the order of the stream, stand for a flipped entry.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from host_offload.queue.cached import CachedRecords
from host_offload.queue.device import DeviceQueue, TransferLost
from host_offload.queue.native import Totals
from host_offload.queue.pinned import PinnedRecords
from host_offload.queue.transfer import DEMAND, Transfer
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.experts import Elsewhere
from moejax.step.layer_programs import IDLE, READ_THROUGH
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import StepSpec
from moejax.step.transports.transport import LayerInputs, Parts, Transport
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.stage import Entries

DEMANDS = 8
"""Records that a layer waits for which are on their way at once: staging memory. Ten in flight have
nine tenths of a link's rate, one has less than half (shared/DESIGN.md, section 6)."""


class CopyTransport(Transport):
    """A DeviceQueue, and a walk of layers that brings what a layer misses beside what the device
    computes.

    `plan` decides on the device and is read by the host, which waits for it, the only time in a
    layer. Then, in this order:

    1. what the plan wants that is not in its cell is queued as demands, and copies begin, demands
       before others; after them, while nothing is enqueued that they would have to wait for,
    2. the experts that are there are computed, beside those copies,
    3. each record that was missing is read into its cell, or computed as it is where it has none,
       by programs that wait for its copy in stream order, and then those experts are computed.

    Where experts stream, those of a layer are brought before it, and one program computes them.
    Raises ValueError for a store of another kind.
    """

    stage_key = ProgramKey("admit")

    @classmethod
    def serves(cls, steps: StepSpec) -> bool:
        return steps.separate

    def __init__(self, steps: StepSpec, buffers: Buffers, compiler: Compiler):
        super().__init__(steps, buffers, compiler)
        stored, spec = [buffers.store.arrays[name] for name in buffers.stored], steps.queue
        if steps.tiers:  # packed residents are made of dense ones
            stored = stored[:1]
        records = [held for held in stored if isinstance(held, PinnedRecords | CachedRecords)]
        if spec is None or len(records) < len(stored):
            raise ValueError(
                "these steps need a store of separate pinned arrays: load it with new_builder and "
                "cache_of (moejax.start.decide.transfers) of the same settings"
            )
        self.records, self._streams = records[0], steps.window
        pieces = [held.sizes for held in records]
        self.spec, self._waves = spec.of_chunks(max(map(max, pieces))), steps.shapes.waves
        ahead = spec.threads
        if steps.window:  # all of a layer's
            ahead = steps.config.num_experts * len(pieces[0])
        else:
            through = tuple(("through", version) for version in range(len(records)))
            self.shared_parts = (*_parts("blank", "plan_beside", "compute"), *through)
            self.parts = (*_parts("blank", "plan", "compute", "combine"), *through)
        self.device_queue = DeviceQueue(records, buffers.device, ahead=ahead)
        self.staging_bytes = (DEMANDS + spec.threads + 1) * max(map(sum, pieces))
        self._awaited: dict[int, int] = {}
        """Arena row of a cell whose record has not been read into it → ticket."""
        self._no_cells = itertools.count(-1, -1)
        """Numbers that are no cell's, for records that get none."""
        self._admitted: list[tuple[int, jax.Array]] = []
        """Layers of stage lists that were carried out, and what `admit` said, not yet read."""
        self._failed: list[tuple[int, TransferFailure]] = []
        """Experts that could not be computed, with the number of their step."""
        self._steps = 0
        self.unpacked = 0
        """Records of packed residents that a stream has decoded within the arena."""
        lands = (ProgramKey("land", run=version) for version in range(len(records)))
        compiler.need(*lands, ProgramKey("forget"))

    # ---- a layer's experts

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        if self._streams:
            return super().compute(parts, inputs)
        y, counts = self.compute_rows(parts, inputs, None)
        return parts["combine", None](inputs.x, y, inputs.routing.weights), counts

    def compute_rows(
        self, parts: Parts, inputs: LayerInputs, share: Elsewhere | None
    ) -> tuple[jax.Array, jax.Array]:
        """As Transport; share: None without a second processor."""
        buffers, ids = self._buffers, inputs.routing.ids
        number = buffers.numbers[inputs.layer]
        y, counts = parts["blank", None](buffers.tables, ids)
        plan = parts["plan" if share is None else "plan_beside", None]
        beside = () if share is None else (share.beside,)
        for wave in buffers.numbers[: 1 if inputs.step.kind == "decode" else self._waves]:
            buffers.tables, counts, seen = plan(buffers.tables, counts, ids, number, wave, *beside)
            y = self._compute_wave(parts, inputs, y, np.asarray(seen).tolist(), share)
        return y, counts

    def _compute_wave(
        self,
        parts: Parts,
        inputs: LayerInputs,
        y: jax.Array,
        planned: Sequence[Sequence[int]],
        share: Elsewhere | None,
    ) -> jax.Array:
        """y with the rows of the experts that are due. planned: what the plan says of each expert
        (layer_programs._planned)."""
        buffers, layer = self._buffers, inputs.layer
        rows, filled, versions = planned
        self.queue_admitted()
        self.land_arrived()
        due = [(expert, row) for expert, row in enumerate(rows) if row != IDLE]
        for expert, row in due:
            if filled[expert]:  # whatever was on its way there is nobody's
                self.drop(row)
        missing = [
            (expert, row)
            for expert, row in due
            if filled[expert] or row == READ_THROUGH or row in self._awaited
        ]
        there = [expert for expert, _ in due if (expert, rows[expert]) not in missing]
        if share is not None:
            missing.sort(key=lambda each: int(share.order[each[0]]))

        def compute(y: jax.Array, experts: Sequence[int]) -> jax.Array:
            if not experts:
                return y
            listed = np.full(len(rows), -1, np.int32)
            listed[: len(experts)] = sorted(experts)
            memory = buffers.arena, buffers.tables, buffers.stores
            index, count = buffers.numbers[layer], np.int32(len(experts))
            seen = inputs.normed, inputs.routing.ids
            return parts["compute", None](y, *memory, *seen, index, listed, count)

        groups = [missing[i : i + DEMANDS] for i in range(0, len(missing), DEMANDS)]
        for number, group in enumerate(groups or [[]]):
            tickets = [self._demand(layer, expert, versions[expert], row) for expert, row in group]
            self.device_queue.begin(others=number + 1 >= len(groups))
            if number == 0:
                y = compute(y, there)
            came = []
            for (expert, row), ticket in zip(group, tickets, strict=True):
                try:
                    if row == READ_THROUGH:
                        y = self._compute_through(parts, inputs, y, expert, ticket)
                    else:
                        self.land(row, ticket)
                        came.append(expert)
                except TransferLost as error:
                    self.lose(layer, expert, row, str(error))
            y = compute(y, came)
        return y

    def _compute_through(
        self, parts: Parts, inputs: LayerInputs, y: jax.Array, expert: int, ticket: int
    ) -> jax.Array:
        """y with the rows of an expert without a cell. Raises TransferLost."""
        computed, buffers = [], self._buffers
        version = self.device_queue.version(ticket)

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            seen = inputs.normed, inputs.routing.ids, buffers.numbers[inputs.layer]
            after, mark = parts["through", version](
                y, buffers.stores, *seen, np.int32(expert), tuple(pieces)
            )
            computed.append(after)
            return mark

        self.device_queue.take(ticket, move)
        return computed[0]

    # ---- records and cells

    def _demand(self, layer: int, expert: int, version: int, row: int) -> int:
        """The ticket of a record that the running layer waits for."""
        if row == READ_THROUGH:
            return self.device_queue.submit(self.transfer_of(layer, expert, version=version))
        ticket = self._awaited.get(row)
        if ticket is None or self.device_queue.failed(ticket):
            self.drop(row)
            ticket = self.device_queue.submit(Transfer(layer, expert, version, row))
            self._awaited[row] = ticket
        else:
            self.device_queue.reorder(ticket, DEMAND, 0)
        return ticket

    def transfer_of(
        self, layer: int, expert: int, cause: str = DEMAND, version: int = 0
    ) -> Transfer:
        """A transfer into staging alone, which has no numbers of cells."""
        return Transfer(layer, expert, version, next(self._no_cells), cause)

    def land(self, row: int, ticket: int) -> None:
        """Dispatches the copy of a record from staging into its cell. Raises TransferLost."""
        version = self.device_queue.version(ticket)

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            self._buffers.arena, mark = self._compiler.call(
                ProgramKey("land", run=version), self._buffers.arena, np.int32(row), tuple(pieces)
            )
            return mark

        self.device_queue.take(ticket, move)
        self._awaited.pop(row, None)

    def land_arrived(self) -> None:
        """Moves what came ahead of need into its cells."""
        cells = {ticket: row for row, ticket in self._awaited.items()}
        for ticket in self.device_queue.arrived():
            if ticket in cells:
                self.land(cells[ticket], ticket)
            else:  # of a step that ended early
                self.device_queue.drop(ticket)

    def drop(self, row: int) -> None:
        """Nobody wants any more what was on its way into a cell."""
        if (ticket := self._awaited.pop(row, None)) is not None:
            self.device_queue.drop(ticket)

    def lose(self, layer: int, expert: int, row: int, message: str) -> None:
        """An expert of the running step could not be computed; it is absent."""
        self._failed.append((self._steps, TransferFailure(layer, expert, message)))
        if row != READ_THROUGH:
            self._forget(row)

    def stage(self, layer: int, entries: Entries, done: jax.Array, *, ahead: bool) -> jax.Array:
        buffers = self._buffers
        numbers = buffers.numbers[layer], buffers.numbers[int(ahead)]
        buffers.tables, done, admitted = self._compiler.call(
            self.stage_key, buffers.tables, *numbers, entries, done
        )
        admitted.copy_to_host_async()
        self._admitted.append((layer, admitted))
        return done

    def queue_admitted(self) -> None:
        """Queues what stage lists brought since the last time. The host has waited for something
        that was dispatched later, or waits here."""
        admitted, self._admitted = self._admitted, []
        for layer, said in admitted:
            for expert, version, row in np.asarray(said).T.tolist():
                if row >= 0:
                    self.drop(row)
                    transfer = Transfer(layer, expert, version, row, "prefetch")
                    self._awaited[row] = self.device_queue.submit(transfer)

    def _forget(self, row: int) -> None:
        self._awaited.pop(row, None)
        self._buffers.tables = self._compiler.call(
            ProgramKey("forget"), self._buffers.tables, np.int32(row)
        )

    # ---- steps, and between them

    def populate(self, rows: np.ndarray, versions: np.ndarray) -> None:
        """As Transport. Raises TransferLost where a record cannot be copied."""
        places = np.argwhere(rows >= 0).tolist()
        for i in range(0, len(places), DEMANDS):
            some = [
                Transfer(layer, expert, int(versions[layer, expert]), int(rows[layer, expert]))
                for layer, expert in places[i : i + DEMANDS]
            ]
            tickets = self.device_queue.submit_all(some)
            self.device_queue.begin()
            for transfer, ticket in zip(some, tickets, strict=True):
                self.land(transfer.cell, ticket)

    def begin_output(self) -> tuple:
        """The number of the step in the place of an arena's writes."""
        number, self._steps = self._steps, self._steps + 1
        self.device_queue.observe()  # what has settled is kept until then
        return (np.array([0, number], np.uint32),)

    def failures(self, writes: int) -> list[TransferFailure]:
        """As Transport; `writes` is the number of the step."""
        failed = [failure for step, failure in self._failed if step <= writes]
        self._failed = [(step, failure) for step, failure in self._failed if step > writes]
        return failed

    def totals(self) -> Totals:
        size = sum(self.records.sizes)
        decoded = {"unpacked": self.unpacked, "unpacked_bytes": self.unpacked * size}
        return dataclasses.replace(self.device_queue.totals(), **decoded)

    def drain(self) -> None:
        """What is on its way is moved into its cells by programs dispatched now."""
        self.queue_admitted()
        for row, ticket in [*self._awaited.items()]:
            try:
                self.land(row, ticket)
            except TransferLost:
                self._forget(row)

    def close(self) -> None:
        self.device_queue.close()


def _parts(*names: str) -> tuple[tuple[str, None], ...]:
    return tuple((name, None) for name in names)
