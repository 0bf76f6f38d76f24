"""The engine of some cells of a grid: one start and one compilation, other policies and budgets by
contents of tables."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Spec
from host_offload.control.paging import PagedSpec
from host_offload.memory.budget import cells_per_layer
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.versions import with_versions
from moejax.costs.measure import calibrate
from moejax.costs.rates import measure_rates
from moejax.costs.store import identity, kept_cost_model
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import user_errors
from moejax.evaluate.experiments.arms import Arm
from moejax.evaluate.experiments.definition import NO_LINK, Cell, Experiment, GridSizes
from moejax.evaluate.experiments.workload import Counter, Workload, run
from moejax.models.directory import model_directory
from moejax.start.build import router_weights, start_engine
from moejax.start.decide.start_plan import StartPlan
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of

VERSION_COLUMNS = (
    *("hi", "lo", "absent", "promotions", "demotions", "deferred"),
    *("promoted_bytes", "demoted_bytes", "budget_bytes", "peak_bytes"),
)
"""Columns of experts in two versions: how many are in which, and what transitions came to."""


@dataclasses.dataclass(frozen=True)
class Group:
    """What one engine is for: cells that agree in these."""

    driver: str
    precision: str
    link_rate: str
    batch: int
    arrays: frozenset[str]
    """What its steps give out for policies; steps that do are others, and slower."""
    budget: str | None = None
    """The budget of experts in two versions, which each start lays out anew; None: any."""


def group_of(cell: Cell, experiment: Experiment) -> Group:
    """The group of a cell, whatever its mode."""
    arm = experiment.arms[cell.policy]
    arrays = arm.arrays if cell.mode == "measured" else arm.simulated_arrays
    budget = cell.budget if experiment.mixed(cell.precision) else None
    return Group(cell.driver, cell.precision, cell.link_rate, cell.batch, arrays, budget)


@dataclasses.dataclass(frozen=True)
class Granted:
    """What a budget comes to for an arm."""

    cells: tuple[int, ...]
    """Each layer's."""
    experts: int
    """A layer's experts."""
    expert_bytes: int
    """What the cells take."""
    learned_bytes: int
    """What the arm learned takes, which the budget pays for."""
    moves_cells: bool

    @property
    def columns(self) -> dict[str, int]:
        """Columns of a record."""
        return {
            "cells_least": min(self.cells),
            "cells_most": max(self.cells),
            "experts": self.experts,
            "expert_bytes": self.expert_bytes,
            "learned_bytes": self.learned_bytes,
            "moves_cells": self.moves_cells,
        }


@dataclasses.dataclass(frozen=True)
class Terms:
    """What budgets and policies come to in some cells, with an engine or without."""

    experiment: Experiment
    arms: Mapping[str, Arm]
    sizes: GridSizes
    base: Spec
    """What policies are told by an engine of all budgets."""
    kv_bytes: int
    router: np.ndarray | None
    """float32[L, D, E]; None: routing without a model."""
    mixed: Granted | None = None
    """What the budget came to where experts have two versions."""

    def granted(self, cell: Cell) -> Granted:
        """The cells of a budget, as even as they can be over the layers."""
        if self.mixed is not None:
            return self.mixed
        arm = self.arms[cell.policy]
        slots = self.sizes.expert_slots(cell.budget, arm, self.experiment.equal)
        cells = cells_per_layer(slots, self.base.layers, self.base.experts)
        nbytes = slots * self.sizes.slot_bytes
        learned = arm.learned_bytes(self.base)
        return Granted(cells, self.base.experts, nbytes, learned, arm.moves_cells or arm.pooled)

    def spec(self, cell: Cell) -> Spec:
        """What the policies of a cell are told: an arena of this budget and the KV, not the largest
        one of the grid."""
        needs_router = any("router" in policy.needs for policy in self.arms[cell.policy].policies)
        return dataclasses.replace(
            self.base,
            budget_bytes=self.granted(cell).expert_bytes + self.kv_bytes,
            seed=cell.seed,
            router=self.router if needs_router else None,
        )


def terms_of_trace(experiment: Experiment, arms: Mapping[str, Arm], trace: Trace) -> Terms:
    """The terms of routing without a model. Raises UserError for a trace that does not say what
    policies are told."""
    with user_errors(TraceError):
        spec = spec_of(trace.header)
    size = max(int(np.max(sizes)) for sizes in spec.version_bytes.values())
    kv_bytes = max(spec.budget_bytes - spec.layers * spec.experts * size, 0)
    return Terms(experiment, arms, GridSizes(spec, size, size, None), spec, kv_bytes, None)


@dataclasses.dataclass(frozen=True)
class Bench:
    """An engine that runs cells of a group, one after the other."""

    terms: Terms
    plan: StartPlan
    engine: Engine
    started: Mapping[str, Any]
    """What the start took, as plain data."""

    def measured(self, cell: Cell, workload: Workload, trace: Trace | None) -> dict[str, Any]:
        """The columns of one run of a cell, from a cold start. trace: of the workload's routing."""
        runner = self.engine.runner
        compiled = len(runner.executables())
        granted, policies = self.terms.granted(cell), self.terms.arms[cell.policy]
        self.engine.begin_anew(self.terms.spec(cell), policies.policies_in(trace), granted.cells)
        counter = Counter(granted.cells, self.engine.statistics.record_bytes)
        columns = {**granted.columns, **run(self.engine, workload, counter)}
        return {**columns, "compiled": len(runner.executables()) - compiled}

    def started_run(self, workload: Workload) -> dict[str, Any]:
        """The columns of the first run of an engine of experts in two versions, from what the start
        laid out."""
        runner, granted = self.engine.runner, self.terms.mixed
        assert granted is not None
        compiled = len(runner.executables())
        counter = Counter(granted.cells, self.engine.statistics.record_bytes)
        columns = {**granted.columns, **run(self.engine, workload, counter)}
        compiled = len(runner.executables()) - compiled
        return {**columns, **self.versions(), "compiled": compiled}

    def versions(self) -> dict[str, Any]:
        """How many experts have which version, and what transitions came to."""
        control = self.engine.control
        told = None if control is None else control.controller.stats().get("precision")
        stats: dict[str, Any] = dict(told or {})
        if not stats:
            tables = self.engine.runner.tables
            version = np.asarray(tables.version)[np.asarray(tables.address) >= 0]
            stats = dict(zip(("hi", "lo"), np.bincount(version, minlength=2).tolist(), strict=True))
        return {name: stats[name] for name in VERSION_COLUMNS if name in stats}


@contextmanager
def loaded_model(experiment: Experiment, precision: str) -> Iterator[tuple[LoadedModel, float]]:
    """The model in a precision, and seconds; leaving the context frees it."""
    largest = max(experiment.batch)
    options = experiment.engine_options("device", precision, largest, budget=experiment.budgets[0])
    settings = settings_of(options)
    use_compilation_cache()
    device = select_device(options.runtime.device, options.runtime.threads)
    began = time.perf_counter()
    loaded = load_checkpoint(
        model_directory(options.model.model),
        options.model.dtype,
        device,
        None,
        options.model.step,
        options.model.name_map,
        settings.versions,
    )
    loaded = with_versions(loaded, settings.versions, quantizer=settings.precision.quantizer)
    try:
        yield loaded, time.perf_counter() - began
    finally:
        for array in jax.tree.leaves(loaded.params):
            array.delete()
        loaded.store.delete()


@contextmanager
def bench_of(experiment: Experiment, group: Group, loaded: LoadedModel) -> Iterator[Bench]:
    """The bench of a group, with everything compiled that its arms may ask for and the machine's
    rates measured; leaving the context frees its arena, not the model."""
    asked = group.driver, group.precision, group.batch, group.link_rate, group.budget
    options = experiment.engine_options(*asked)
    settings = dataclasses.replace(settings_of(options), trace_arrays=group.arrays)
    device = select_device(options.runtime.device, options.runtime.threads)
    began = time.perf_counter()
    engine, plan = start_engine(loaded, settings, device)
    runner = engine.runner
    try:
        runner.wait_compiled(everything=True)
        compile_s = time.perf_counter() - began
        rates = measure_rates(runner)
        started = {
            "compile_s": compile_s,
            "link_bytes_per_s": rates.link,
            "memory_bytes_per_s": rates.memory,
            "device": device.device_kind,
            "platform": device.platform,
            "layers": plan.spec.layers,
            "experts": plan.spec.experts,
            "top_k": plan.spec.top_k,
            "slot_bytes": plan.steps.layout.slot_bytes,
        }
        layout, slots = plan.steps.layout, plan.budget.kv_slots
        terms = Terms(
            experiment,
            experiment.arms,
            GridSizes.of_plan(plan),
            plan.spec,
            slots * layout.slot_bytes,
            router_weights(loaded),
            None if plan.mixed is None else _granted(plan),
        )
        yield Bench(terms, plan, engine, started)
    finally:
        runner.delete(given=False)


def keep_costs(experiment: Experiment, group: Group, loaded: LoadedModel) -> None:
    """Has the costs of a group's steps measured and kept as `moejax calibrate` does, where they are
    not yet: by an engine of its own, with room for all experts and without a link, which
    predictions take as given. Raises UserError as calibrate does."""
    whole = dataclasses.replace(experiment, budgets=("100%",))
    plain = dataclasses.replace(group, link_rate=NO_LINK, arrays=frozenset(), budget=None)
    plan, _ = dry_run(whole.engine_options(plain.driver, plain.precision, plain.batch))
    with user_errors(where="costs: measure: "):
        if kept_cost_model(identity(plan.steps)) is None:
            with bench_of(whole, plain, loaded) as bench:
                calibrate(bench.engine.runner)


def _granted(plan: StartPlan) -> Granted:
    """What a start came to that laid out cells of two versions."""
    experts, layout = plan.spec.experts, plan.steps.layout
    cells = (experts,) * plan.spec.layers  # every expert is resident in one of them
    if isinstance(plan.mixed, PagedSpec):
        cells = tuple(plan.mixed.cells.sum(axis=1).tolist())
    slots = plan.budget.slots - plan.budget.kv_slots
    return Granted(cells, experts, slots * layout.slot_bytes, 0, False)
