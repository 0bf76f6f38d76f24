"""The protocol of a step: what policies decide goes to the device before it, what the step did goes
to the policies after it was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import MapRows, Moment
from host_offload.control.step_record import LayerRouting, LinkUse, StepRecord, StepRows
from host_offload.memory.tables import Entry, HandOver, Move, Residency


class Device(Protocol):
    """Tables and arena that steps are run on, in dispatch order: the engine's runner with either
    driver (moejax.step.executor) or a simulator's pager (host_offload.simulate)."""

    def prepare(self, controller: Controller) -> None:
        """What this controller's policies may decide will be asked for, from the first step on."""
        ...

    def snapshot(self) -> Callable[[], Residency]:
        """Copies the tables as the steps so far leave them; what it returns waits for the copy."""
        ...

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Other contents of some tables, for the steps to come."""
        ...

    def write_maps(self, rows: MapRows) -> None:
        """Other rows of the store of expert maps, for the steps to come; asked of devices whose
        controller has a `search`."""
        ...

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells within the arena, for the steps to come."""
        ...

    def hand_over(self, moves: Sequence[HandOver]) -> None:
        """Cells go from layer to layer, before whatever comes next; asked of devices whose
        controller has a pool."""
        ...

    def carried_out(self) -> np.ndarray:
        """int32[S], 1 for each entry that was carried out of the list that Control.between_layers
        returned last."""
        ...

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """Says who computes what a layer misses (controller.Assigned), before its experts. Asked of
        devices with a second processor."""
        ...

    def link_use(self) -> LinkUse:
        """The queue of transfers beside compute as it is now; asked between layers, of devices
        whose controller's policies need it."""
        ...


class Moved(NamedTuple):
    """What became of a resize request."""

    settled: bool
    """Nothing is left to do: it was carried out, or it failed and the earlier split stands."""
    changed: bool
    """The split is another one than before."""


class Resizer(Protocol):
    """Who moves the line between experts and KV."""

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        """Before a step. cells: int32[L] wanted of each layer; None: as they are. kv_pages: pages
        wanted of KV, likewise."""
        ...

    def limit(self, max_running: int) -> None:
        """No more sequences than so many should run at once."""
        ...


class Control:
    """Runs the policies of a controller beside the steps of a device.

    The caller calls before_step and after_dispatch around each dispatch, and after_read when the
    step was read, which is after the next one was dispatched; between layers, where there are
    moments, between_layers. Nothing but between_layers waits for a step that runs: a copy of the
    tables follows each step, and is read with it. What policies decide reaches the device as
    contents of tables and as the next step's list of transfers.

    resizer: carries out what policies want of budgets; without it that waits, and counts as
    deferred.
    """

    def __init__(self, device: Device, controller: Controller, resizer: Resizer | None = None):
        self.device, self.controller, self.resizer = device, controller, resizer
        self.resized: Moved | None = None
        """What the step that is being made has changed of budgets; None: nothing."""
        self._snapshots: dict[int, Callable[[], Residency]] = {}
        self._making: int | None = None
        """A step that before_step was called for and after_dispatch was not."""
        self._dispatched = -1
        self._origin_s: float | None = None
        self._seconds = 0.0
        self._handed = self._more = False
        """A list was returned from between layers that was not settled; before the next moment that
        asks, something wants to know what became of it, or there is more to hand out."""
        self._known: int | None = None
        """The layer of the running step until whose experts the controller's tables are the
        device's, but for a list that was not settled; None: not known."""
        device.prepare(controller)
        self._update_tables()

    def before_step(self, number: int) -> list[Entry]:
        """What policies decided so far becomes the tables' contents; returns the step's list of
        transfers, at most spec.stage_entries."""
        controller = self.controller
        if self._making is not None:
            controller.staging.forget(self._making)
            self._handed = self._more = False
        self._making, self.resized, self._known = number, None, None
        self._move_cells()
        if controller.needs_residency and controller.tables is None:
            controller.see(self.device.snapshot()())
        controller.begin_step(number, seconds=self._seconds)
        self._resize()
        return self._stages(number)

    def after_dispatch(self, number: int) -> None:
        """Right after the step: has its tables copied."""
        self._making, self._dispatched = None, number
        if self._handed:
            self.controller.settle_between_layers(self._read_done())
        if self.controller.needs_residency:
            self._snapshots[number] = self.device.snapshot()

    def after_read(self, record: StepRecord) -> None:
        """A step was read: runs the policies that follow steps, intervals and turns."""
        if self._origin_s is None:
            self._origin_s = record.start_s
        self._seconds = record.read_s - self._origin_s
        tables = self._snapshots.pop(record.number, None)
        for earlier in [number for number in self._snapshots if number < record.number]:
            del self._snapshots[earlier]
        self.controller.end_step(
            record,
            age=self._dispatched - record.number,
            seconds=self._seconds,
            tables=None if tables is None else tables(),
        )

    def between_layers(
        self, moment: Moment, layer: int, rows: StepRows, routing: LayerRouting | None = None
    ) -> list[Entry]:
        """A moment inside the step that runs; returns transfers to carry out right now. layer: −1
        before the first. rows: of the step. routing: of the layer, once it is known.

        Where nobody is asked, and all that is wanted was handed out, nothing is read: what became
        of it the next moment that asks finds out, which waits for the device anyway."""
        controller = self.controller
        if moment not in controller.moments and not self._more:
            return []
        # Only a layer's experts and lists change tables without the controller.
        coming = max(layer, 0)
        unseen = self._handed or self._known != coming
        self._known = coming
        done = self._read_done() if self._handed else None
        entries = controller.between_layers(
            moment,
            self._making if self._making is not None else self._dispatched,
            layer,
            seconds=self._seconds,
            rows=rows,
            routing=routing,
            tables=self.device.snapshot()() if unseen and controller.needs_residency else None,
            done=done,
            link=self.device.link_use() if controller.needs_link else None,
        )
        self._update_tables()
        self._hand_over_cells()
        if (assigned := controller.assigned(layer)) is not None:
            self.device.assign(*assigned)
        self._handed = bool(entries)
        watched = Moment.TRANSFER in controller.moments
        self._more = self._handed and (watched or controller.staging.queued > len(entries))
        return entries

    # ---- pieces

    def _stages(self, number: int) -> list[Entry]:
        entries = self.controller.stages(number)
        self._move_cells()
        self._hand_over_cells()
        self._update_tables()
        return entries

    def _read_done(self) -> np.ndarray:
        self._handed = self._more = False
        return self.device.carried_out()

    def _move_cells(self) -> None:
        """A cell that was moved before the device failed is where it should be, and stays."""
        if moves := self.controller.changes.moves:
            self.device.move_cells(moves)
            moves.clear()

    def _hand_over_cells(self) -> None:
        if hand_overs := self.controller.changes.hand_overs:
            self.device.hand_over(hand_overs)
            hand_overs.clear()

    def _update_tables(self) -> None:
        changes = self.controller.changes
        if changes.contents:
            self.device.set_tables(changes.contents)
            changes.contents.clear()
        while changes.map_rows:
            self.device.write_maps(changes.map_rows[0])
            del changes.map_rows[0]

    def _resize(self) -> None:
        controller, resizer = self.controller, self.resizer
        if controller.max_running is not None and resizer is not None:
            resizer.limit(controller.max_running)
        cells, kv_pages = controller.wanted_cells, controller.wanted_kv_pages
        if cells is None and kv_pages is None:
            return
        moved = Moved(False, False) if resizer is None else resizer.move(cells, kv_pages)
        if moved.changed or moved.settled:
            self.resized = moved
        controller.settle_budget(moved.settled)
        # Where every expert is resident, slots that move hold nobody.
        if self.resized and controller.needs_residency and controller.transitions is None:
            controller.see(self.device.snapshot()())
