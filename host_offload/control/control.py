"""The protocol of a step: decisions of policies go to the device before the step, and its results
go to the policies after it was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import MapRows, Moment
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import (
    Glance,
    LayerRouting,
    LinkUse,
    StepRecord,
    StepRows,
)
from host_offload.memory.tables import Copy, Entry, HandOver, Move, Residency


class Device(Protocol):
    """Tables and arena of steps, in dispatch order: the engine's executor (moejax.step.executor) or
    a simulator's pager (host_offload.simulate)."""

    def prepare(self, controller: Controller) -> None:
        """Prepares for all decisions that the controller's policies may make."""
        ...

    def snapshot(self) -> Callable[[], Residency]:
        """Copies the tables as the steps so far leave them. The returned function waits for the
        copy."""
        ...

    def look(self) -> Residency:
        """The tables as the steps so far leave them, to look at before the next call: that may
        change them."""
        ...

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Sets the contents of some tables, for the next steps."""
        ...

    def write_maps(self, rows: MapRows) -> None:
        """Writes rows of the store of expert maps, for the next steps; called only if the
        controller has a `search`."""
        ...

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells within the arena, for the next steps."""
        ...

    def hand_over(self, moves: Sequence[HandOver]) -> None:
        """Moves cells between layers, before anything else; called only if the controller has a
        pool."""
        ...

    def carried_out(self) -> np.ndarray:
        """int32[S], 1 for each entry that was carried out of the list that Control.between_layers
        returned last."""
        ...

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """Says which processor computes each missed expert of a layer (controller.Assigned), before
        the layer's experts. Called only for devices with a second processor."""
        ...

    def link_use(self) -> LinkUse:
        """The present state of the queue of transfers; called between layers, if policies need
        it."""
        ...


class CopyingDevice(Device, Protocol):
    """A device that copies experts beside its steps: that of every run whose experts get new
    versions as these arrive."""

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Begins to copy records into cells that no entry points to, beside the steps to come, once
        the steps so far are done."""
        ...

    def ended_copies(self) -> dict[tuple[int, int], bool]:
        """The copies that ended since the last call: (layer, expert) → whether all bytes are there.
        Called only after begin_copies."""
        ...


class Moved(NamedTuple):
    """The result of a resize request."""

    settled: bool
    """Whether nothing is left to do: it was carried out, or it failed and the old split remains."""
    changed: bool
    """Whether the split has changed."""


class Resizer(Protocol):
    """Moves the split between experts and KV."""

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        """Moves the split before a step.

        - `cells`: int32[L], wanted cells of each layer; None: unchanged.
        - `kv_pages`: wanted pages of KV; None: unchanged.
        """
        ...

    def limit(self, max_running: int) -> None:
        """Limits the number of sequences that run at once."""
        ...


class Control:
    """Runs the policies of a controller beside the steps of a device.

    The caller calls before_step and after_dispatch around each dispatch, after_read when the step
    was read, which is after the next one was dispatched, and between_layers at moments between
    layers. Only between_layers waits for a running step: a copy of the tables follows each step and
    is read with it. Decisions reach the device as contents of tables and as the next step's list of
    transfers.

    - `resizer`: carries out budgets that policies want; without it they wait and count as deferred.
    """

    def __init__(self, device: Device, controller: Controller, resizer: Resizer | None = None):
        self.device, self.controller, self.resizer = device, controller, resizer
        self.resized: Moved | None = None
        """The change of budgets before the step in progress; None: none."""
        self._snapshots: dict[int, Callable[[], Residency]] = {}
        self._making: int | None = None
        """A step between its before_step and its after_dispatch; None: there is none."""
        self._dispatched = -1
        self._origin_s: float | None = None
        self._seconds = 0.0
        self._handed = self._more = False
        """Whether a list from between layers is not settled, and whether its result is wanted, or
        there is more to hand out, before the next moment at which policies are asked."""
        self._known: int | None = None
        """The layer of the running step up to whose experts the controller's tables equal the
        device's, except for a list that is not settled; None: unknown."""
        device.prepare(controller)
        self._update_tables()

    def before_step(self, number: int) -> list[Entry]:
        """Writes the decisions so far to the tables. Returns the step's list of transfers, at most
        spec.stage_entries."""
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
        """Call right after the dispatch: copies the tables."""
        self._making, self._dispatched = None, number
        if self._handed:
            self.controller.settle_between_layers(self._read_done())
        if self.controller.needs_tables:
            self._snapshots[number] = self.device.snapshot()

    def seconds(self, start_s: float, read_s: float) -> float:
        """Returns the time from the first step's dispatch until a step was read.

        - `start_s`, `read_s`: when it was dispatched and read, by time.perf_counter.
        """
        if self._origin_s is None:
            self._origin_s = start_s
        return read_s - self._origin_s

    def rests(self, number: int, glance: Glance) -> bool:
        """Whether no policy needs a step that was read; if so, that is all of it."""
        if not self.controller.rest(glance):
            return False
        if (tables := self._tables(number)) is not None:
            self.controller.see(tables)
        return True

    def after_read(self, record: StepRecord, needed: bool = False) -> None:
        """Runs the policies of steps, intervals and turns after a step was read.

        - `needed`: whether `rests` said that a policy needs the step.
        """
        self._seconds = self.seconds(record.start_s, record.read_s)
        self.controller.end_step(
            record,
            age=self._dispatched - record.number,
            seconds=self._seconds,
            tables=self._tables(record.number),
            needed=needed,
        )

    @property
    def looks_between_layers(self) -> bool:
        """Whether the step that begins has such a moment."""
        return any(map(self.looks_at, BETWEEN_LAYERS))

    def looks_at(self, moment: Moment) -> bool:
        """Whether between_layers has something to do at a moment inside the running step."""
        return self._more or self.controller.is_asked(moment)

    def between_layers(
        self, moment: Moment, layer: int, rows: StepRows, routing: LayerRouting | None = None
    ) -> list[Entry]:
        """A moment inside the running step. Returns transfers to carry out now.

        If no policy is asked and all wanted transfers were handed out, nothing is read: the next
        moment with a policy finds the results, and waits for the device anyway.

        - `layer`: −1 before the first.
        - `rows`: of the step.
        - `routing`: of the layer, once it is known.
        """
        controller = self.controller
        if not self.looks_at(moment):
            return []
        # Only a layer's experts and lists change tables without the controller's knowledge.
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
            tables=self.device.look() if unseen and controller.needs_residency else None,
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

    def _tables(self, number: int) -> Residency | None:
        """Takes the tables after a step that was read; None: they were not copied."""
        tables = self._snapshots.pop(number, None)
        for earlier in [before for before in self._snapshots if before < number]:
            del self._snapshots[earlier]
        return None if tables is None else tables()

    def _stages(self, number: int) -> list[Entry]:
        arriving, changes = self.controller.arriving, self.controller.changes
        if arriving is not None and arriving.in_flight:
            arriving.publish(number, self._copying().ended_copies())
        entries = self.controller.stages(number)
        self._move_cells()
        self._hand_over_cells()
        self._update_tables()
        while changes.copies:  # one that the device refuses is not begun twice, nor others
            self._copying().begin_copies(changes.copies[:1])
            del changes.copies[0]
        return entries

    def _copying(self) -> CopyingDevice:
        return cast(CopyingDevice, self.device)  # a simulator refuses such runs

    def _read_done(self) -> np.ndarray:
        self._handed = self._more = False
        return self.device.carried_out()

    def _move_cells(self) -> None:
        """Moves cells. A cell that was moved before the device failed is already in its place."""
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
        # If every expert is resident, slots that move are empty.
        if self.resized and controller.needs_residency and controller.transitions is None:
            controller.see(self.device.snapshot()())
