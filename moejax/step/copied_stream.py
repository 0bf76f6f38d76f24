"""Streams experts out of separate pinned arrays by jax's copies: on GPUs, and for ops that are not
native.

FluxMoE's ring has two halves. One half is cells of the arena, where a layer's experts are computed.
The other half is staging memory of jax, into which the next layer's records are copied meanwhile.
The parts of a layer, in the order of dispatch, which is the order of the device's stream:

1. attend and route.
2. `seat` passes the ring's cells to this layer (`Tables.address` is the page table). `unpack`
   decodes packed residents into cells. `land` copies the other records from staging into cells, by
   programs that wait for the records.
3. The copies of the next layer's records begin. Their memory is free once those programs have run,
   so the copies go on beside everything that is dispatched later.
4. The layer's experts are computed.

This order also keeps write-after-read (a record lands after the layer before has computed) and
read-after-write. The host reads nothing back, so it runs ahead of the device.

A packed resident keeps a cell of its own. It is packed from the dense record when it gets the cell;
the host keeps no packed copy. Packed residents are computed in their packed form, and nothing of
them streams, or they are decoded into the ring (`unpack`) as in the paper, though in the stream of
the experts and before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from host_offload.control.window import PACKED, PACKED_VERSION, WindowSpec
from host_offload.queue.device import TransferLost
from host_offload.queue.transfer import Transfer
from host_offload.versions.encoders import EncodingError, encode
from host_offload.versions.store_versions import as_weights
from moejax.errors import UserError
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.owned_stream import SetTables
from moejax.step.programs import LANDED, ProgramKey
from moejax.step.step_parts import StepSpec
from moejax.step.transports.copies import CopyTransport


class _Seat(NamedTuple):
    """A record of the coming layer: the arena row of its cell, and the ticket of its transfer."""

    expert: int
    row: int
    ticket: int


class _OfLayer(NamedTuple):
    """The experts that a layer puts into the ring; their cells stay the same while a window is
    open."""

    brought: list[tuple[int, int]]
    """(expert, arena row) of experts that come from the host."""
    unpacked: list[tuple[int, int]]
    """(arena row of the packed record, arena row) of packed residents."""


class CopiedStream:
    """Streams experts through the cells of one layer and staging memory of the next one.

    - `set_tables`: Executor.set_tables.
    """

    window: WindowSpec | None = None

    def __init__(
        self,
        steps: StepSpec,
        buffers: Buffers,
        compiler: Compiler,
        transport: CopyTransport,
        set_tables: SetTables,
    ):
        self._steps, self._buffers, self._compiler = steps, buffers, compiler
        self._transport, self._set_tables = transport, set_tables
        self._layers, self._experts = buffers.tables.address.shape
        self._coming: tuple[int, list[_Seat]] | None = None
        """(layer, its records) that are in staging or on their way there."""
        self._holder = self._layers - 1
        """The layer that has the ring's cells now."""
        of_layers = buffers.layer_versions
        self._versions = [0] * self._layers
        """The version number of each layer's records as the store has them."""
        if of_layers is not None:
            self._versions = [numbers[0] for numbers in of_layers.numbers]
        self._ring: list[_OfLayer] = []
        lands = (ProgramKey("land_many", run=v) for v in range(len(transport.device_queue.records)))
        compiler.need(ProgramKey("seat"), *lands)
        if steps.tiers:
            compiler.need(ProgramKey("land_packed"))
            for version in (0, PACKED_VERSION):
                compiler.start(ProgramKey("shift", run=version))
        if steps.packed is not None:
            compiler.need(ProgramKey("unpack"))

    @property
    def staging_bytes(self) -> int:
        """Bytes of the ring's half outside of the arena, without records that are decoded into
        cells."""
        if self.window is None:
            return self._experts * max(sum(r.sizes) for r in self._transport.device_queue.records)
        return self.window.staged_rows * self._steps.layout.hidden * 2

    def open(self, window: WindowSpec) -> None:
        """Opens a window as OwnedStream.open does. Raises TransferLost if a resident's record
        cannot be copied, and UserError for an expert that cannot be packed."""
        rows, versions = window.residents()
        packed = (rows >= 0) & (versions == PACKED_VERSION)
        for layer, expert in np.argwhere(packed).tolist():
            self._land_packed(int(rows[layer, expert]), self.pack(layer, expert))
        if (by_layer := self._buffers.layer_versions) is not None:
            versions = by_layer.of(versions)
        self._transport.populate(np.where(packed, -1, rows), versions)
        self._begin_window(window)

    def change(self, window: WindowSpec) -> None:
        """Replaces the window as OwnedStream.change does, without waiting for the steps. Raises as
        `open` does, and leaves the window as it was."""
        before = self.window
        if before is None or before.tier.shape != window.tier.shape:
            raise ValueError("a window is changed to another one of the same model's")
        (had, old), (rows, versions) = before.residents(), window.residents()
        stays = (had >= 0) & (rows >= 0) & (old == versions)
        comes = (rows >= 0) & ~stays
        is_packed = versions == PACKED_VERSION
        # First what may fail: it leaves the arena alone, and uses the staging memory of the layer
        # that was coming.
        self._drop_coming()
        packed = [
            (int(rows[layer, expert]), self.pack(layer, expert))
            for layer, expert in np.argwhere(comes & is_packed).tolist()
        ]
        tickets = self._bring(rows, comes & ~is_packed)
        moved = np.argwhere(stays & (had != rows)).tolist()
        self._shift([(int(old[at]), int(had[at]), int(rows[at])) for at in map(tuple, moved)])
        for row, record in packed:
            self._land_packed(row, record)
        for row, ticket in tickets:
            self._transport.land(row, ticket)
        self._begin_window(window)

    def _begin_window(self, window: WindowSpec) -> None:
        """Sets the tables to a window whose residents are in their cells, and begins to copy the
        first layer."""
        self._set_tables(window.contents())
        self.window, self._coming, self._holder = window, None, window.layers - 1
        rows, _ = window.residents()
        self._ring = [_of_layer(window, layer, own) for layer, own in enumerate(rows)]
        self._begin(0)

    def _bring(self, rows: np.ndarray, wanted: np.ndarray) -> list[tuple[int, int]]:
        """Brings dense records into staging, and waits for them.

        - `rows`: int32[L, E], arena rows of their cells.
        - `wanted`: bool[L, E].

        Returns (arena row, ticket) of each. Raises TransferLost, keeping none, if one did not come.
        """
        queue, places = self._transport.device_queue, np.argwhere(wanted).tolist()
        tickets = queue.submit_all(
            [
                Transfer(layer, expert, self._versions[layer], int(rows[layer, expert]))
                for layer, expert in places
            ]
        )
        settled = [queue.wait(ticket) for ticket in tickets]
        lost = [s.message for s in settled if s is not None and s.state == "failed"]
        if lost:
            for ticket in tickets:
                queue.drop(ticket)
            raise TransferLost(lost[0])
        return [(int(rows[tuple(at)]), t) for at, t in zip(places, tickets, strict=True)]

    def _shift(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Dispatches moves (version, from row, to row) of residents within the arena.

        Residents keep their order in the arena. So no move overwrites a record that is yet to move,
        if those to higher rows go first, from the last to the first, and then those to lower rows,
        from the first to the last.
        """
        up = sorted((m for m in moves if m[2] > m[1]), key=lambda m: -m[1])
        down = sorted((m for m in moves if m[2] < m[1]), key=lambda m: m[1])
        for version, group in itertools.groupby([*up, *down], key=lambda move: move[0]):
            due = [move[1:] for move in group]
            for i in range(0, len(due), LANDED):
                some = due[i : i + LANDED]
                some += [(some[-1][1],) * 2] * (LANDED - len(some))  # padding: moves to itself
                sources, rows = np.array(some, np.int32).T.copy()
                self._buffers.arena = self._compiler.call(
                    ProgramKey("shift", run=version), self._buffers.arena, sources, rows
                )

    def _land_packed(self, row: int, record: np.ndarray) -> None:
        self._buffers.arena, _ = self._compiler.call(
            ProgramKey("land_packed"), self._buffers.arena, np.int32(row), (record,)
        )

    def pack(self, layer: int, expert: int) -> np.ndarray:
        """Packs an expert's dense record. Returns uint16[rows, D]. Raises UserError if the record
        cannot be packed."""
        assert self._steps.formats is not None
        dense, packed = (version.cell for version in self._steps.formats)
        pieces = self._transport.records.ask(layer, expert, demand=True, priority=0)
        record = np.concatenate([np.asarray(piece) for piece in pieces.pieces()])
        try:
            return encode(as_weights(record[None], dense, dense.dtype), packed, workers=1)[0]
        except EncodingError as error:
            raise UserError(
                f"tiers={self._steps.tiers}: layer {layer}, expert {expert} cannot be packed "
                f"({error.reason}); leave tiers out"
            ) from error

    def materialize(self, layer: int, routed: jax.Array) -> None:
        """Dispatches what a layer needs before its experts, and begins the next layer's copies.

        - `routed`: an array of the layer's routing; once it is ready, the device waits for records.
        """
        self._seat(layer, routed)
        self._begin((layer + 1) % self._layers)

    def _seat(self, layer: int, routed: jax.Array) -> None:
        """Passes the ring's cells to the layer and dispatches the copies of its records into them.

        A record that did not come is brought a second time. If that fails too, the expert is
        absent, and the step's requests will end.
        """
        buffers = self._buffers
        places = buffers.numbers[self._holder], buffers.numbers[layer]
        buffers.tables = self._compiler.call(ProgramKey("seat"), buffers.tables, *places)
        self._holder = layer
        if self._coming is None or self._coming[0] != layer:  # a step before ended in the middle
            self._begin(layer)
        assert self._coming is not None
        (_, seats), self._coming = self._coming, None
        mark = self._unpack(layer)  # while the others come
        missing = [seat for seat, _ in self._land_all(seats)]
        transport, again = self._transport, []
        for seat in missing:
            once_more = transport.transfer_of(layer, seat.expert, version=self._versions[layer])
            ticket = transport.device_queue.submit_again(once_more)
            again.append(seat._replace(ticket=ticket))
        for seat, why in self._land_all(again):
            transport.lose(layer, seat.expert, seat.row, why)
        if seats:
            mark = transport.device_queue.last_mark
        if mark is not None:
            transport.device_queue.watch(routed, mark)

    def _unpack(self, layer: int) -> jax.Array | None:
        """Dispatches the decoding of a layer's packed residents into their cells of the ring,
        LANDED a program. Returns an array that is ready once they are there; None without any."""
        due, mark = self._ring[layer].unpacked, None
        for i in range(0, len(due), LANDED):
            some = due[i : i + LANDED]
            some += some[-1:] * (LANDED - len(some))  # padding: decoded again into the same cell
            sources, rows = np.array(some, np.int32).T.copy()
            self._buffers.arena, mark = self._compiler.call(
                ProgramKey("unpack"), self._buffers.arena, sources, rows
            )
        self._transport.unpacked += len(due)
        return mark

    def _begin(self, layer: int) -> None:
        """Begins to copy a layer's records into staging."""
        self._drop_coming()
        self._coming = layer, self._begin_copies(layer, self._ring[layer].brought)

    def _drop_coming(self) -> None:
        for seat in () if self._coming is None else self._coming[1]:
            self._transport.device_queue.drop(seat.ticket)
        self._coming = None

    def _begin_copies(self, layer: int, seats: Sequence[tuple[int, int]]) -> list[_Seat]:
        """Begins to copy the records of (expert, arena row) into staging."""
        transport, version = self._transport, self._versions[layer]
        transfers = [transport.transfer_of(layer, e, "prefetch", version) for e, _ in seats]
        tickets = transport.device_queue.submit_all(transfers)
        transport.device_queue.begin()
        return [_Seat(*seat, ticket) for seat, ticket in zip(seats, tickets, strict=True)]

    def _land_all(self, seats: Sequence[_Seat]) -> list[tuple[_Seat, str]]:
        """Dispatches the copies of records from staging into their cells, LANDED a program if all
        of a group came. Returns records that did not come, each with the reason."""
        lost = []
        for i in range(0, len(seats), LANDED):
            group = seats[i : i + LANDED]
            if len(group) == LANDED and self._land_group(group):
                continue
            for seat in group:
                try:
                    self._transport.land(seat.row, seat.ticket)
                except TransferLost as error:
                    lost.append((seat, str(error)))
        return lost

    def _land_group(self, seats: Sequence[_Seat]) -> bool:
        """Dispatches the copies of LANDED records into their cells by one program. Returns False,
        dispatching nothing, if one did not come."""
        rows = np.array([seat.row for seat in seats], np.int32)
        version = self._transport.device_queue.version(seats[0].ticket)

        def move(records: Sequence[Sequence[jax.Array]]) -> jax.Array:
            pieces = tuple(map(tuple, records))
            self._buffers.arena, mark = self._compiler.call(
                ProgramKey("land_many", run=version), self._buffers.arena, rows, pieces
            )
            return mark

        try:
            self._transport.device_queue.take_all([seat.ticket for seat in seats], move)
        except TransferLost:
            return False
        return True


def _of_layer(window: WindowSpec, layer: int, own: np.ndarray) -> _OfLayer:
    """Returns the experts that a layer puts into the ring.

    - `own`: int32[E], arena rows of the layer's residents.
    """
    found = _OfLayer([], [])
    for expert, row in window.seats(layer):
        if window.tier[layer, expert] == PACKED:
            found.unpacked.append((int(own[expert]), row))
        else:
            found.brought.append((expert, row))
    return found
