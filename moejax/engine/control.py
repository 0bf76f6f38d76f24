"""The border between engine and controller: step records in, tables and stage lists out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.control.controller import Controller, Event
from host_offload.control.interface import Costs, Moment, Policy, Spec
from host_offload.control.paging import PagedSpec
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.staging import Entry, Residency
from host_offload.control.transfers import Move
from host_offload.memory.placement import ResidentSpec
from host_offload.memory.tables import read_snapshot, with_contents
from host_offload.policies.prefetch.fitted import check_fitted
from moejax.engine.records import StepRecord
from moejax.engine.resize import Moved, Resizer
from moejax.step.programs import STAGES
from moejax.step.runner import Runner
from moejax.step.trace_arrays import TraceArrays
from moejax.traces.tracer import config_digest, moved_bytes
from pallas_kernels.stage import Entries


@dataclasses.dataclass(frozen=True)
class PageUse:
    """KV and queues when a step was read, see host_offload.control.interface.Observation."""

    kv_used: int
    kv_peak: int
    kv_pages: int
    kv_swapped: int
    running: int
    waiting: int
    waiting_tokens: int


class Control:
    """Runs the policies beside an engine's steps.

    The engine calls before_step and after_dispatch around each dispatch, and after_read when the
    step was read, which is after the next one was dispatched. Nothing here waits for a step that
    runs: a copy of the tables follows each step, and is read with it. What the policies decide
    reaches the device as contents of tables and as the next step's stage list; all executables are
    compiled at the start.
    """

    def __init__(self, runner: Runner, controller: Controller, resizer: Resizer | None = None):
        """resizer: carries out what policies want of budgets; without it that waits, and counts as
        deferred."""
        self.runner, self.controller, self.resizer = runner, controller, resizer
        self.resized: Moved | None = None
        """What the step that is being made has changed of budgets; None: nothing was wanted."""
        self._snapshots: dict[int, jax.Array] = {}
        self._begun: int | None = None
        """A step that before_step was called for and after_dispatch was not."""
        self._dispatched = -1
        self._origin_s: float | None = None
        self._seconds = 0.0
        self._routed: dict[str, np.ndarray] = {}
        between = controller.needs_at(frozenset({Moment.ROUTED, Moment.EXPERTS_BEGIN}))
        self._layer_needs = [name for name in TraceArrays._fields if name in between]
        self._handed = False
        """The runner has carried out a list from between layers that was not settled."""
        # The controller counts what it handed out as done. Where the runner failed, it is still to
        # be done, before anything that the controller hands out later.
        self._moves: list[Move] = []
        self._contents: dict[str, np.ndarray] = {}
        if controller.needs_residency:
            runner.prepare("snapshot")
        if controller.stages_transfers:
            if controller.spec.blocking:
                runner.prepare("transfer")
            else:
                runner.prepare_stages()
            if controller.spec.resident is not None:
                runner.prepare("move")
        if "kv_pages" in controller.writes:
            runner.prepare("move_pages", "swap_out", "swap_in")
        if controller.moments & BETWEEN_LAYERS:
            runner.hooks = self.hooks()

    def before_step(self, number: int) -> Entries | None:
        """What policies decided so far becomes the tables' contents; returns the step's stage list,
        int32[STAGES] each, None when there is nothing to stage."""
        controller = self.controller
        if self._begun is not None:
            controller.forget(self._begun)
            self._handed = False
        self._begun = number
        self._move_cells()
        if controller.needs_residency and controller.tables is None:
            controller.see(self._tables_now())
        controller.begin_step(number, seconds=self._seconds)
        self._move_budget()
        entries = self._stages(number)
        while controller.spec.blocking and entries is not None:
            controller.settle_now(number, np.asarray(self.runner.transfer(entries)))
            entries = self._stages(number)
        return entries

    def _stages(self, number: int) -> Entries | None:
        entries = self.controller.stages(number)
        self._moves = self.controller.take_moves()
        self._move_cells()
        self._update_tables()
        return self._as_lists(entries)

    def after_dispatch(self, number: int) -> None:
        """Right after the step: has its tables copied."""
        self._begun, self._dispatched = None, number
        if self._handed:
            self.controller.settle_between_layers(self._done())
        if self.controller.needs_residency:
            copy = self.runner.snapshot()
            copy.copy_to_host_async()
            self._snapshots[number] = copy

    def after_read(self, record: StepRecord, use: PageUse) -> None:
        """A step was read: runs the policies that follow steps, intervals and turns."""
        if self._origin_s is None:
            self._origin_s = record.dispatched_s
        self._seconds = record.read_s - self._origin_s
        copy = self._snapshots.pop(record.number, None)
        for earlier in [number for number in self._snapshots if number < record.number]:
            del self._snapshots[earlier]
        facts = {name: getattr(record, name) for name in _OF_RECORD}
        facts |= {"bucket": record.rows, **vars(use)}
        self.controller.end_step(
            record.number,
            age=self._dispatched - record.number,
            seconds=self._seconds,
            facts=facts,
            tables=None if copy is None else self._read(copy),
            staged=record.staged,
            finished=record.finished,
        )

    def hooks(self) -> LayerHooks | None:
        """For moejax.step.host_driver.HostRunner.hooks; None when no policy looks between
        layers."""
        return LayerHooks(self) if self.controller.moments & BETWEEN_LAYERS else None

    def between_layers(
        self, moment: Moment, layer: int, facts: dict[str, np.ndarray]
    ) -> Entries | None:
        """A hook of the step that is running; returns transfers to carry out right now."""
        controller = self.controller
        if moment not in controller.moments and not self._handed:
            return None
        done = self._done() if self._handed else None
        entries = controller.between_layers(
            moment,
            self._begun if self._begun is not None else self._dispatched,
            layer,
            seconds=self._seconds,
            facts=facts,
            tables=self._tables_now() if controller.needs_residency else None,
            done=done,
        )
        self._update_tables()
        self._handed = bool(entries)
        return self._as_lists(entries)

    def finish(self) -> None:
        """The engine ends; see Controller.finish."""
        self.controller.finish()

    def stats(self) -> dict[str, Any]:
        return self.controller.stats()

    def layer_arrays(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """What policies between layers need of the layer that was just routed, float16[N, 1, ·].
        rows bool[T]: those that hold a token."""
        arrays = self.runner.layer_arrays  # type: ignore[attr-defined]
        wanted = {name: getattr(arrays, name) for name in self._layer_needs}
        return {name: np.asarray(array)[rows, None] for name, array in wanted.items()}

    # ---- pieces

    def _done(self) -> np.ndarray:
        self._handed = False
        return np.asarray(self.runner.transfers[-1].done)  # type: ignore[attr-defined]

    def _tables_now(self) -> Residency:
        """Waits for what was dispatched: at the start and between layers only."""
        return self._read(self.runner.snapshot())

    def _read(self, copy: jax.Array) -> Residency:
        tables = read_snapshot(np.asarray(copy), self.runner.tables)
        versions = self.runner.layer_versions
        return tables if versions is None else versions.seen(tables)

    def _move_cells(self) -> None:
        """A cell that was moved before the runner failed is where it should be, and stays."""
        if self._moves:
            self.runner.move_cells(self._moves)
            self._moves = []

    def _update_tables(self) -> None:
        self._contents |= self.controller.take_update()
        if self._contents:
            _set_tables(self.runner, self._contents)
            self._contents = {}

    def _as_lists(self, entries: Sequence[Entry]) -> Entries | None:
        if not entries:
            return None
        versions = self.runner.layer_versions
        return _lists(entries if versions is None else versions.entries(entries))

    def _move_budget(self) -> None:
        controller = self.controller
        self.resized = None
        if controller.max_running is not None and self.resizer is not None:
            self.resizer.limit(controller.max_running)
        cells, kv_pages = controller.wanted_cells, controller.wanted_kv_pages
        if cells is None and kv_pages is None:
            return
        moved = Moved(False, False)
        if self.resizer is not None:
            moved = self.resized = self.resizer.move(cells, kv_pages)
        controller.settle_budget(moved.settled)
        # Where every expert is resident, slots that move hold nobody.
        seen = controller.needs_residency and controller.transitions is None
        if (moved.changed or moved.settled) and seen:
            controller.see(self._tables_now())


_OF_RECORD = (
    *("request", "user", "position", "phase", "ids", "weights", "missed", "compiled"),
    *TraceArrays._fields,
)
"""Fields that a StepRecord and an Observation share."""


@dataclasses.dataclass(frozen=True)
class LayerHooks:
    """moejax.step.host_driver.Hooks for the policies of a Control."""

    control: Control

    def before_routing(self, layer: int) -> Entries | None:
        return self.control.between_layers(Moment.LAYER_BEGIN, layer, {})

    def after_routing(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> Entries | None:
        """ids int32[T, k], the number of experts for padding; weights float32[T, k]."""
        rows = ids[:, 0] < self.control.controller.spec.experts
        routed = {"ids": ids[rows, None].astype(np.int16), "weights": weights[rows, None]}
        routed |= self.control.layer_arrays(rows)
        self.control._routed = routed
        return self.control.between_layers(Moment.ROUTED, layer, routed)

    def before_experts(self, layer: int) -> Entries | None:
        return self.control.between_layers(Moment.EXPERTS_BEGIN, layer, self.control._routed)


def _set_tables(runner: Runner, changed: Mapping[str, np.ndarray]) -> None:
    """What a controller wants tables to have."""
    if runner.layer_versions is not None:
        changed = runner.layer_versions.contents(changed)
    runner.tables = with_contents(runner.tables, changed)


def _lists(entries: Sequence[Entry]) -> Entries:
    lists = np.full((len(Entries._fields), STAGES), -1, np.int32)
    lists[:, : len(entries)] = np.array(entries, np.int32).T
    return Entries._make(lists)


def start_control(
    runner: Runner,
    policies: Sequence[Policy],
    *,
    max_model_len: int,
    seed: int,
    routers: Sequence[jax.Array],
    resident: ResidentSpec | None = None,
    costs: Costs | None = None,
    resizer: Resizer | None = None,
) -> Control | None:
    """The control of start_controller's controller, where its policies are asked anything."""
    controller = start_controller(
        runner,
        policies,
        max_model_len=max_model_len,
        seed=seed,
        routers=routers,
        resident=resident,
        costs=costs,
    )
    return Control(runner, controller, resizer) if controller.asks else None


def start_controller(
    runner: Runner,
    policies: Sequence[Policy],
    *,
    max_model_len: int,
    max_num_seqs: int | None = None,
    seed: int,
    routers: Sequence[jax.Array],
    resident: ResidentSpec | None = None,
    paged: PagedSpec | None = None,
    costs: Costs | None = None,
    listener: Callable[[Event], None] | None = None,
) -> Controller:
    """The controller of an engine with these policies, whose eviction weights the tables get.
    routers: of each run of MoE layers, [n, E, D]. resident: where every expert has a version in the
    arena. paged: where layers have cells of two versions. costs: for policies that need them.

    Raises ValueError for policies that cannot run.
    """
    router = None
    if any("router" in policy.needs for policy in policies):
        weights = np.concatenate([np.asarray(r, np.float32) for r in routers])
        router = np.swapaxes(weights, 1, 2)
    spec = spec_of_engine(runner, max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed)
    if resident is not None:
        spec = dataclasses.replace(spec, resident=resident, capacity=resident.capacity)
    if paged is not None:
        spec = dataclasses.replace(spec, capacity=paged.capacity)
    check_fitted(policies, config_digest(runner.config))
    spec = dataclasses.replace(spec, router=router, costs=costs)
    controller = Controller(spec, policies, listener=listener)
    _set_tables(runner, controller.take_update())
    return controller


def spec_of_engine(
    runner: Runner, *, max_model_len: int, max_num_seqs: int | None = None, seed: int
) -> Spec:
    """What policies are told of an engine, but for the router and costs. max_num_seqs: None: as
    many as steps have rows."""
    layout = runner.layout
    layers, experts = runner.tables.address.shape
    most = max(record.nbytes for record in layout.records)
    return Spec(
        layers=layers,
        experts=experts,
        top_k=runner.config.num_experts_per_tok,
        hidden=runner.config.hidden_size,
        page_bytes=layout.page.nbytes,
        page_tokens=layout.page.block_size,
        budget_bytes=runner.slots * layout.slot_bytes,
        slot_bytes=layout.slot_bytes,
        kv_floor_bytes=-(-max_model_len // layout.page.block_size) * layout.page.nbytes,
        # The lists of two steps: one that runs and the next one.
        staging_bytes=2 * STAGES * most,
        seed=seed,
        driver=runner.driver,
        version_bytes=runner.version_bytes,
        moved_bytes=moved_bytes(runner),
        min_cells=np.zeros(layers, np.int32),
        cell_bound=runner.tables.cell_row.shape[1],
        stage_entries=STAGES,
        max_num_seqs=runner.shapes.rows if max_num_seqs is None else max_num_seqs,
    )
