"""Brings experts out of separate pinned arrays by jax's own copies, beside compute. Used if the
native library does not own the arena: on GPUs, and for ops that are not native.

Tables say at once where an expert will be. So no decision depends on the speed of a copy, and a run
can be replayed. The program that moves a record into its cell is dispatched before every program
that computes the expert, and the device's stream keeps this order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from host_offload.memory.tables import Copy
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
"""Most records of a layer that are copied at once, which sizes the staging memory. Ten copies in
flight reach nine tenths of a link's rate, one less than half (shared/DESIGN.md, section 6)."""


class CopyTransport(Transport):
    """Brings what a layer misses by a DeviceQueue, while the device computes the layer's other
    experts.

    `plan` decides on the device. The host waits for its result, its only wait in a layer. Then, in
    this order:

    1. Planned records that are not in their cells are queued as demands. Copies begin, demands
       before prefetches, before any program is enqueued that they would have to wait for.
    2. The experts in cells are computed, beside those copies.
    3. Each missing record is moved into its cell, by a program that waits for its copy in stream
       order, and then its expert is computed. A record without a cell is computed from staging.

    If experts stream, all experts of a layer are brought before it, and one program computes them.
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
            ahead = steps.config.num_experts * max(map(len, pieces))
        else:
            through = tuple(("through", version) for version in range(len(records)))
            self.shared_parts = (*_parts("blank", "plan_beside", "compute"), *through)
            self.parts = (*_parts("blank", "plan", "compute", "combine"), *through)
        places = [buffers.store.places(name) for name in buffers.stored][: len(records)]
        self.device_queue = DeviceQueue(records, buffers.device, ahead=ahead, places=places)
        self.staging_bytes = (DEMANDS + spec.threads + 1) * max(map(sum, pieces))
        self._awaited: dict[int, int] = {}
        """Ticket of the record that a cell waits for, by the cell's arena row."""
        self._no_cells = itertools.count(-1, -1)
        """Negative cell numbers, for records without a cell."""
        self._admitted: list[tuple[int, jax.Array]] = []
        """(layer, result of `admit`) of stage lists that were carried out and not yet read."""
        self._arriving: dict[tuple[int, int], tuple[int, int]] = {}
        """(layer, expert) → (ticket, arena row) of begin_copies."""
        self._ended: dict[tuple[int, int], bool] = {}
        """Results of ended_copies that are known already."""
        self._failed: list[tuple[int, TransferFailure]] = []
        """Experts that could not be computed, with the number of their step."""
        self._steps = 0
        self.unpacked = 0
        """Packed residents that a stream has decoded within the arena, counted once each pass."""
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
        """Does as Transport.compute_rows.

        - `share`: None without a second processor.
        """
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
        """Returns y with the rows of the experts that are due.

        - `planned`: the plan of each expert (layer_programs._planned).
        """
        buffers, layer = self._buffers, inputs.layer
        rows, filled, versions = planned
        self.queue_admitted()
        self.land_arrived()
        due = [(expert, row) for expert, row in enumerate(rows) if row != IDLE]
        for expert, row in due:
            if filled[expert]:  # the record on its way there is no longer wanted
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
        """Returns y with the rows of an expert without a cell. Raises TransferLost if its record
        did not come."""
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
        """Queues a record that the running layer waits for, or moves it to the front of the queue.
        Returns its ticket."""
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
        """Returns a transfer into staging only, without a cell."""
        return Transfer(layer, expert, version, next(self._no_cells), cause)

    def land(self, row: int, ticket: int) -> None:
        """Dispatches the copy of a record from staging into its cell. Raises TransferLost if the
        record did not come."""
        version = self.device_queue.version(ticket)

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            self._buffers.arena, mark = self._compiler.call(
                ProgramKey("land", run=version), self._buffers.arena, np.int32(row), tuple(pieces)
            )
            return mark

        self.device_queue.take(ticket, move)
        self._awaited.pop(row, None)

    def land_arrived(self) -> None:
        """Moves records that came ahead of need into their cells."""
        cells = {ticket: row for row, ticket in self._awaited.items()}
        beside = {ticket for ticket, _ in self._arriving.values()}
        for ticket in self.device_queue.arrived():
            if ticket in cells:
                self.land(cells[ticket], ticket)
            elif ticket not in beside:  # of a step that ended early
                self.device_queue.drop(ticket)

    def drop(self, row: int) -> None:
        """Drops the record that is on its way into a cell."""
        if (ticket := self._awaited.pop(row, None)) is not None:
            self.device_queue.drop(ticket)

    def lose(self, layer: int, expert: int, row: int, message: str) -> None:
        """Notes that an expert of the running step could not be computed, and makes it absent."""
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
        """Queues the transfers that stage lists admitted since the last call. Waits for the device
        unless the host has already waited for a later program."""
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
        """Does as Transport.populate. Raises TransferLost if a record cannot be copied."""
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

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Does as Transport.begin_copies: into staging, and into the cells when ended_copies says
        so, by programs that follow all that read what the cells had before."""
        for layer, expert, version, row in copies:
            transfer = Transfer(layer, expert, version, row, "transition")
            self._arriving[layer, expert] = self.device_queue.submit(transfer), row
        self.device_queue.begin()

    def ended_copies(self) -> dict[tuple[int, int], bool]:
        self.device_queue.begin()
        there = {*self.device_queue.arrived()}
        self._end_copies(lambda ticket: ticket in there or self.device_queue.failed(ticket))
        ended, self._ended = self._ended, {}
        return ended

    def _end_copies(self, due: Callable[[int], bool]) -> None:
        """Moves records of begin_copies into their cells, those whose tickets are due."""
        for place, (ticket, row) in [*self._arriving.items()]:
            if due(ticket):
                try:
                    self.land(row, ticket)
                    self._ended[place] = True
                except TransferLost:
                    self._ended[place] = False
                del self._arriving[place]

    def begin_output(self) -> tuple:
        """Returns the number of the step in place of an arena's writes."""
        number, self._steps = self._steps, self._steps + 1
        self.device_queue.observe()  # the queue keeps settled transfers until this call
        return (np.array([0, number], np.uint32),)

    def failures(self, writes: int) -> list[TransferFailure]:
        """Does as Transport.failures; `writes` is the number of the step."""
        failed = [failure for step, failure in self._failed if step <= writes]
        self._failed = [(step, failure) for step, failure in self._failed if step > writes]
        return failed

    def totals(self) -> Totals:
        size = sum(self.records.sizes)
        decoded = {"unpacked": self.unpacked, "unpacked_bytes": self.unpacked * size}
        return dataclasses.replace(self.device_queue.totals(), **decoded)

    def drain(self) -> None:
        """Dispatches the programs that move all records on their way into their cells."""
        self.queue_admitted()
        self._end_copies(lambda ticket: True)
        for row, ticket in [*self._awaited.items()]:
            try:
                self.land(row, ticket)
            except TransferLost:
                self._forget(row)

    def close(self) -> None:
        self.device_queue.close()


def _parts(*names: str) -> tuple[tuple[str, None], ...]:
    return tuple((name, None) for name in names)
