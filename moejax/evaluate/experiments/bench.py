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
from host_offload.memory.budget import cells_per_layer
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.versions import with_versions
from moejax.costs.rates import measure_rates
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.evaluate.experiments.arms import Arm
from moejax.evaluate.experiments.definition import Cell, Experiment
from moejax.evaluate.experiments.workload import Counter, Workload, run
from moejax.models.directory import model_directory
from moejax.start.build import router_weights, start_engine
from moejax.start.decide.plan import Plan
from moejax.start.settings import settings_of


@dataclasses.dataclass(frozen=True)
class Group:
    """What one engine is for: cells that agree in these."""

    driver: str
    precision: str
    batch: int
    arrays: frozenset[str]
    """What its steps give out for policies; steps that do are others, and slower."""


def group_of(cell: Cell, experiment: Experiment) -> Group:
    """The group of a cell, whatever its mode."""
    arrays = experiment.arms[cell.policy].arrays
    return Group(cell.driver, cell.precision, cell.batch, arrays)


@dataclasses.dataclass(frozen=True)
class Granted:
    """What a budget comes to for an arm."""

    cells: tuple[int, ...]
    """Each layer's."""
    expert_bytes: int
    """What the cells take."""
    learned_bytes: int
    """What the arm learned takes, which the budget pays for."""

    @property
    def columns(self) -> dict[str, int]:
        """Columns of a record."""
        return {
            "cells_least": min(self.cells),
            "cells_most": max(self.cells),
            "expert_bytes": self.expert_bytes,
            "learned_bytes": self.learned_bytes,
        }


@dataclasses.dataclass(frozen=True)
class Bench:
    """An engine that runs cells of a group, one after the other."""

    experiment: Experiment
    plan: Plan
    engine: Engine
    router: np.ndarray
    """float32[L, D, E]"""
    started: Mapping[str, Any]
    """What the start took, as plain data."""

    def granted(self, cell: Cell) -> Granted:
        """The cells of a budget, as even as they can be over the layers."""
        arm, spec = self.experiment.arms[cell.policy], self.plan.spec
        slots = self.experiment.expert_slots(cell.budget, arm, self.plan)
        cells = cells_per_layer(slots, spec.layers, spec.experts)
        expert_bytes = slots * self.plan.steps.layout.slot_bytes
        return Granted(cells, expert_bytes, arm.learned_bytes(spec))

    def spec(self, cell: Cell) -> Spec:
        """What the policies of a cell are told: an arena of this budget and the KV, not the largest
        one of the grid."""
        layout, kv_slots = self.plan.steps.layout, self.plan.budget.kv_slots
        granted, arm = self.granted(cell), self.experiment.arms[cell.policy]
        needs_router = any("router" in policy.needs for policy in arm.policies)
        return dataclasses.replace(
            self.plan.spec,
            budget_bytes=granted.expert_bytes + kv_slots * layout.slot_bytes,
            seed=cell.seed,
            router=self.router if needs_router else None,
        )

    def begin(self, cell: Cell) -> Granted:
        """Makes the engine one that has just started with the cell's policies and budget."""
        granted, arm = self.granted(cell), self.experiment.arms[cell.policy]
        self.engine.begin_anew(self.spec(cell), arm.policies, granted.cells)
        return granted

    def measured(self, cell: Cell, workload: Workload) -> dict[str, Any]:
        """The columns of one run of a cell, from a cold start."""
        runner = self.engine.runner
        compiled = len(runner.executables())
        granted = self.begin(cell)
        counter = Counter(granted.cells, self.engine.statistics.record_bytes)
        columns = {**granted.columns, **run(self.engine, workload, counter)}
        return {**columns, "compiled": len(runner.executables()) - compiled}


@contextmanager
def loaded_model(experiment: Experiment, precision: str) -> Iterator[tuple[LoadedModel, float]]:
    """The model in a precision, and seconds; leaving the context frees it."""
    options = experiment.engine_options("device", precision, max(experiment.batch))
    settings = settings_of(options)
    use_compilation_cache(options.cache_dir)
    device = select_device(options.device, options.threads)
    began = time.perf_counter()
    loaded = load_checkpoint(
        model_directory(options.model),
        options.dtype,
        device,
        None,
        options.step,
        options.name_map,
        settings.precision.versions,
    )
    loaded = with_versions(loaded, settings.precision.versions, quantizer=options.quantizer)
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
    options = experiment.engine_options(group.driver, group.precision, group.batch)
    settings = dataclasses.replace(settings_of(options), trace_arrays=group.arrays)
    device = select_device(options.device, options.threads)
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
        yield Bench(experiment, plan, engine, router_weights(loaded), started)
    finally:
        runner.delete(given=False)


def arms_of(group: Group, experiment: Experiment) -> list[Arm]:
    """The arms that run in a group."""
    arms = experiment.arms.values()
    return [a for a in arms if group.driver in experiment.drivers(a) and a.arrays == group.arrays]
