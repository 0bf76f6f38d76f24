"""The host driver over a store of separate pinned arrays: it brings what a layer misses itself,
beside what the device computes.

A layer's experts are parts of their own. `plan` decides on the device and is read by the host,
which waits for it, the only time in a layer. Then, in this order:

1. what the plan wants that is not in its cell is queued as demands, and copies begin, demands
   before others; after them, while nothing is enqueued that they would have to wait for,
2. the experts that are there are computed, beside those copies,
3. each record that was missing is read into its cell, or computed as it is where it has none, by
   programs that wait for its copy in stream order, and then those experts are computed.

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
from host_offload.queue.transfer import DEMAND, Progress, QueueSpec, Settled, Transfer
from moejax.step.drivers.host import HostRunner, Parts
from moejax.step.layer_programs import EXPERT_PARTS, IDLE, READ_THROUGH
from moejax.step.parts import Routing
from moejax.step.programs import ProgramKey
from pallas_kernels.cpu.arena import TransferFailure

DEMANDS = 8
"""Records that a layer waits for which are on their way at once: staging memory. Ten in flight have
nine tenths of a link's rate, one has less than half (shared/DESIGN.md, section 6)."""


class QueuedRunner(HostRunner):
    """A HostRunner of StepSpec.separate: a DeviceQueue fills the arena."""

    expert_parts = EXPERT_PARTS
    stage_key = ProgramKey("admit")

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        records = self.store.arrays[self.layout.records[0].version]
        if not isinstance(records, PinnedRecords | CachedRecords) or self.steps.queue is None:
            raise ValueError(
                "these steps need a store of separate pinned arrays: load it with new_builder and "
                "cache_of (moejax.start.decide.transfers) of the same settings"
            )
        self.records = records
        self.device_queue = DeviceQueue(records, self.device, ahead=self._copies_ahead)
        self._awaited: dict[int, int] = {}
        """Arena row of a cell whose record has not been read into it → ticket."""
        self._no_cells = itertools.count(-1, -1)
        """Numbers that are no cell's, for records that get none."""
        self._admitted: list[tuple[int, jax.Array]] = []
        """Layers of stage lists that were carried out, and what `admit` said, not yet read."""
        self._failed: list[tuple[int, TransferFailure]] = []
        """Experts that could not be computed, with the number of their step."""
        self._steps = 0
        self._kept: list[Settled] | None = None
        """What has settled since `progress` told of it; None: nobody asks."""
        self._wave = jax.device_put([*np.arange(self.shapes.waves, dtype=np.int32)], self._sharding)
        self.need(ProgramKey("land"), ProgramKey("forget"))
        super()._compile_first(runs)

    @property
    def queue_spec(self) -> QueueSpec | None:
        spec = self.steps.queue
        return spec and spec.of_chunks(max(self.records.sizes))

    @property
    def _copies_ahead(self) -> int:
        """Pieces of records ahead of need which may be on their way at once."""
        assert self.steps.queue is not None
        return self.steps.queue.threads

    @property
    def staging_bytes(self) -> int:
        assert self.steps.queue is not None
        return (DEMANDS + self.steps.queue.threads + 1) * sum(self.records.sizes)

    # ---- a layer's experts

    def _experts(
        self,
        parts: Parts,
        step: ProgramKey,
        layer: int,
        x: jax.Array,
        normed: jax.Array,
        routing: Routing,
    ) -> tuple[jax.Array, jax.Array]:
        y, counts = self._computed(parts, step, layer, normed, routing.ids)
        return parts["combine", None](x, y, routing.weights), counts

    def _computed(
        self, parts: Parts, step: ProgramKey, layer: int, normed: jax.Array, ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """y of a layer's experts, as far as they are the device's, and its counts."""
        y, counts = parts["blank", None](self.tables, ids)
        for wave in self._wave[:1] if step.kind == "decode" else self._wave:
            counts, seen = self._plan(parts, counts, ids, layer, wave)
            rows, filled = np.asarray(seen).tolist()
            y = self._compute_wave(parts, layer, y, (normed, ids), rows, filled)
        return y, counts

    def _plan(
        self, parts: Parts, counts: jax.Array, ids: jax.Array, layer: int, wave: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The counts after a wave's plan, and what the host reads of it."""
        self.tables, counts, seen = parts["plan", None](
            self.tables, counts, ids, self._index[layer], wave
        )
        return counts, seen

    def _in_turn(self, missing: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """(expert, arena row) of what a wave misses, in the order in which it is brought."""
        return missing

    def _compute_wave(
        self,
        parts: Parts,
        layer: int,
        y: jax.Array,
        inputs: tuple[jax.Array, jax.Array],
        rows: Sequence[int],
        filled: Sequence[int],
    ) -> jax.Array:
        """y with the rows of the experts that are due. rows, filled: as of the plan."""
        self._queue_admitted()
        self._land_arrived()
        due = [(expert, row) for expert, row in enumerate(rows) if row != IDLE]
        for expert, row in due:
            if filled[expert]:  # whatever was on its way there is nobody's
                self._drop(row)
        missing = [
            (expert, row)
            for expert, row in due
            if filled[expert] or row == READ_THROUGH or row in self._awaited
        ]
        there = [expert for expert, _ in due if (expert, rows[expert]) not in missing]

        def compute(y: jax.Array, experts: Sequence[int]) -> jax.Array:
            if not experts:
                return y
            listed = np.full(len(rows), -1, np.int32)
            listed[: len(experts)] = sorted(experts)
            memory = self.arena, self.tables, self.stores
            index, count = self._index[layer], np.int32(len(experts))
            return parts["compute", None](y, *memory, *inputs, index, listed, count)

        turns = self._in_turn(missing)
        groups = [turns[i : i + DEMANDS] for i in range(0, len(turns), DEMANDS)]
        for number, group in enumerate(groups or [[]]):
            tickets = [self._demand(layer, expert, row) for expert, row in group]
            self.device_queue.begin(others=number + 1 >= len(groups))
            if number == 0:
                y = compute(y, there)
            came = []
            for (expert, row), ticket in zip(group, tickets, strict=True):
                try:
                    if row == READ_THROUGH:
                        y = self._through(parts, layer, y, inputs, expert, ticket)
                    else:
                        self._land(row, ticket)
                        came.append(expert)
                except TransferLost as error:
                    self._lose(layer, expert, row, str(error))
            y = compute(y, came)
        return y

    def _demand(self, layer: int, expert: int, row: int) -> int:
        """The ticket of a record that the running layer waits for."""
        if row == READ_THROUGH:
            number = next(self._no_cells)
            return self.device_queue.submit(Transfer(layer, expert, 0, number))
        ticket = self._awaited.get(row)
        if ticket is None or self.device_queue.failed(ticket):
            self._drop(row)
            ticket = self.device_queue.submit(Transfer(layer, expert, 0, row))
            self._awaited[row] = ticket
        else:
            self.device_queue.reorder(ticket, DEMAND, 0)
        return ticket

    def _through(
        self,
        parts: Parts,
        layer: int,
        y: jax.Array,
        inputs: tuple[jax.Array, jax.Array],
        expert: int,
        ticket: int,
    ) -> jax.Array:
        """y with the rows of an expert without a cell. Raises TransferLost."""
        computed = []

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            x, ids = inputs
            after, mark = parts["through", None](
                y, self.stores, x, ids, self._index[layer], np.int32(expert), tuple(pieces)
            )
            computed.append(after)
            return mark

        self.device_queue.take(ticket, move)
        return computed[0]

    # ---- records and cells

    def _land(self, row: int, ticket: int) -> None:
        """Dispatches the copy of a record from staging into its cell. Raises TransferLost."""

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            self.arena, mark = self._call(
                ProgramKey("land"), self.arena, np.int32(row), tuple(pieces)
            )
            return mark

        self.device_queue.take(ticket, move)
        self._awaited.pop(row, None)

    def _land_arrived(self) -> None:
        """Moves what came ahead of need into its cells."""
        cells = {ticket: row for row, ticket in self._awaited.items()}
        for ticket in self.device_queue.arrived():
            if ticket in cells:
                self._land(cells[ticket], ticket)
            else:  # of a step that ended early
                self.device_queue.drop(ticket)

    def _drop(self, row: int) -> None:
        """Nobody wants any more what was on its way into a cell."""
        if (ticket := self._awaited.pop(row, None)) is not None:
            self.device_queue.drop(ticket)

    def _lose(self, layer: int, expert: int, row: int, message: str) -> None:
        """An expert of the running step could not be computed; it is absent."""
        self._failed.append((self._steps, TransferFailure(layer, expert, message)))
        if row != READ_THROUGH:
            self._forget(row)

    def _forget(self, row: int) -> None:
        self._awaited.pop(row, None)
        self.tables = self._call(ProgramKey("forget"), self.tables, np.int32(row))

    def _stage(self, layer: int, entries, done, *, ahead: bool) -> jax.Array:
        self.tables, done, admitted = self._call(
            self.stage_key,
            self.tables,
            self._index[layer],
            self._index[int(ahead)],
            entries,
            done,
        )
        admitted.copy_to_host_async()
        self._admitted.append((layer, admitted))
        return done

    def _queue_admitted(self) -> None:
        """Queues what stage lists brought since the last time. The host has waited for something
        that was dispatched later, or waits here."""
        admitted, self._admitted = self._admitted, []
        for layer, said in admitted:
            for expert, row in np.asarray(said).T.tolist():
                if row >= 0:
                    self._drop(row)
                    transfer = Transfer(layer, expert, 0, row, "prefetch")
                    self._awaited[row] = self.device_queue.submit(transfer)

    # ---- steps, and between them

    def _writes(self) -> tuple:
        """The number of the step in the place of an arena's writes."""
        number, self._steps = self._steps, self._steps + 1
        settled = self.device_queue.observe().settled
        if self._kept is not None:
            self._kept += settled
        return (np.array([0, number], np.uint32),)

    def failures(self, writes: int) -> list[TransferFailure]:
        """As of Runner; writes: the number of the step."""
        failed = [failure for step, failure in self._failed if step <= writes]
        self._failed = [(step, failure) for step, failure in self._failed if step > writes]
        return failed

    def transfer_totals(self) -> Totals | None:
        return self.device_queue.totals()

    def keep_settled(self, keep: bool) -> None:
        self._kept = [] if keep else None

    def progress(self) -> Progress:
        seen = self.device_queue.observe()
        if self._kept is None:
            return seen
        kept, self._kept = self._kept, []
        return dataclasses.replace(seen, settled=(*kept, *seen.settled))

    def drain(self) -> None:
        """As of Runner: what is on its way is moved into its cells by programs dispatched now."""
        self._queue_admitted()
        for row, ticket in [*self._awaited.items()]:
            try:
                self._land(row, ticket)
            except TransferLost:
                self._forget(row)

    def faults(self) -> list[str]:
        found, tables = super().faults(), jax.tree.map(np.asarray, self.tables)
        for layer, cell in np.argwhere((tables.owner >= 0) & (tables.cell_row >= 0)).tolist():
            expert, row = tables.owner[layer, cell], tables.cell_row[layer, cell]
            if not self._same(layer, expert, row):
                found.append(f"layer {layer}, expert {expert}: other bytes than the store's")
        return found

    def _same(self, layer: int, expert: int, row: int) -> bool:
        """Whether the arena has an expert's record from a row on."""
        if isinstance(self.records, CachedRecords):
            rows = jax.lax.dynamic_slice(self.arena, (row, 0), self.records.shape[2:])
            return self.records.source.holds(layer, expert, np.asarray(rows))
        pieces = tuple(jax.device_put(self.records.of(layer, expert), self._sharding))
        return bool(self._call(ProgramKey("compare"), self.arena, np.int32(row), pieces))

    def delete(self, *, given: bool = True) -> None:
        self.device_queue.close()
        for array in self._wave:
            array.delete()
        super().delete(given=given)
