"""The simulator: what the routing of a trace costs under any policy, without a model or a device.

`simulate` takes other policies and budgets than those of the run. host_offload.simulate.replay runs
the trace again unchanged and compares everything. docs/explanation/simulator.md explains both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.controller import Controller, Event
from host_offload.control.interface import Costs, Policy, Spec
from host_offload.control.paging import PagedSpec, read_paged
from host_offload.control.rules import check_policies, check_search, gives_away
from host_offload.memory.pager import resident_tables
from host_offload.memory.placement import ResidentSpec, read_resident
from host_offload.memory.tables import Residency, cold_tables
from host_offload.policies.eviction.eviction_names import EVICTION, with_eviction
from host_offload.policies.placement.placement_names import with_placement
from host_offload.policies.prefetch.fitted import check_fitted
from host_offload.policies.prefetch.prefetch_names import with_prefetch
from host_offload.simulate.simulated_engine import (
    PagerDevice,
    SimulatedEngine,
    SimulatedStep,
    by_step,
)
from host_offload.traces.reader import Trace
from host_offload.traces.schema import KINDS, SAID, BudgetMove, TraceError, TraceHeader
from host_offload.traces.step_sets import read_step_sets

STAGE_ENTRIES = 8
"""Entries of a step's list if the trace does not say: those of the engine."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulated run of T steps and L layers. Each needed expert was a hit, a fill,
    read through or computed by a second processor."""

    number: np.ndarray
    """int64[T]: the steps' numbers in the trace."""
    kind: np.ndarray
    """int8[T]: index into trace_schema.KINDS; −1 if the trace does not know."""
    hits: np.ndarray
    """int32[T, L]"""
    fills: np.ndarray
    """int32[T, L]"""
    read_through: np.ndarray
    """int32[T, L]"""
    placed: np.ndarray
    """int32[T, L]: experts that a second processor computed."""
    staged: np.ndarray
    """int32[T, L]: experts moved ahead of need."""
    bytes: np.ndarray | None
    """int64[T, L]: bytes over the link; None if the trace does not know an expert's bytes."""
    control: dict[str, Any] | None = None
    """Controller.stats(); None if no policy was asked."""

    @property
    def misses(self) -> np.ndarray:
        """int32[T, L]"""
        return self.fills + self.read_through + self.placed

    @property
    def transfers(self) -> np.ndarray:
        """int32[T, L]: experts that crossed the link, on demand or ahead."""
        return self.fills + self.read_through + self.staged

    def of_kind(self, kind: str) -> np.ndarray:
        """bool[T]: the steps of that kind, `prefill` or `decode`."""
        return self.kind == KINDS.index(kind)


def simulate(
    trace: Trace,
    *,
    eviction: str | None = None,
    prefetch: str | None = None,
    placement: str | None = None,
    policies: Sequence[Policy] = (),
    cells: int | Sequence[int] | np.ndarray | PagedSpec | None = None,
    driver: str | None = None,
    spec: Spec | None = None,
    tables: Residency | None = None,
    budgets: Sequence[BudgetMove] | None = None,
    costs: Costs | None = None,
    listener: Callable[[Event], None] | None = None,
    watcher: Callable[[SimulatedStep], None] | None = None,
    clock: Callable[[int], float] | None = None,
    as_run: bool = False,
) -> Simulation:
    """Simulates what the steps of a trace would have moved under these policies, from a cold start.

    - `eviction`, `prefetch`, `placement`, `policies`: as in moejax.LLM, but a placement states all
      of its costs, or `costs` has them.
    - `cells`: of each layer, int[L], or int[L, V] of each version; None: the trace's, or those of
      `spec`, with which every expert may be resident.
    - `driver`: `device` or `host`, which has moments between layers; None: the trace's.
    - `spec`: what policies are told, for `router` and for a trace that does not say it (a converted
      one).
    - `tables`: of the device, which the run changes; None: cold ones, as `cells` says.
    - `budgets`: the budget carried out before each step, in the form of Trace.budgets.
    - `costs`: what policies are told of costs; None: the spec's.
    - `listener`: called with each event of the Controller.
    - `watcher`: called with each step after its dispatch.
    - `clock`: seconds from the start to the reading of a step, by its number; None: the trace's.
    - `as_run`: whether all arguments are as in the run that wrote the trace, so that routing that
      favoured resident experts is unchanged.

    Steps are dispatched and read in the trace's order and at its times, whatever they would cost
    now; without times each is read when the next one was dispatched. Without `budgets`, cells that
    a policy wants are granted at once: KV is not simulated, and a policy that decides about KV is
    refused.

    Raises TraceError for a trace that is damaged, of another model, or without data that a policy
    needs; PolicyError or ValueError for policies that cannot run and for cells that do not fit the
    model.
    """
    header = trace.header
    if (delta := header.spec.get("cache_aware_routing")) and not as_run:
        raise TraceError(
            f"{trace.directory}: cache_aware_routing was {delta}, so what was routed depends on "
            "which experts were resident, and with other policies or cells it would be another; "
            "replay the trace, or simulate one without"
        )
    late = header.spec.get("defer") or "defer=" in (header.spec.get("placement") or "")
    if late and not as_run:
        raise TraceError(
            f"{trace.directory}: experts that were not resident were added a layer late "
            "(placement defer=N), so with other policies or cells other experts would have been "
            "routed; replay the trace, or simulate one without"
        )
    policies = name_policies(policies, eviction, prefetch, placement)
    driver = driver or str(spec.driver if spec else header.spec.get("driver", "device"))
    check_policies(policies, driver)
    check_search(policies, driver)
    check_fitted(policies, header.config_digest)
    granted = _cells(header, cells)
    if not any(policy.moments for policy in policies):
        device = _device_of_weights(header, policies, granted, spec, as_in_trace=cells is None)
        if tables is not None:
            device.tables = tables._replace(victim_weights=device.tables.victim_weights)
        return _gather(trace, _steps_without_control(trace, device, budgets or ()), None, watcher)
    spec = spec or spec_of(header)
    if cells is not None:
        capacity = granted.capacity if granted.cells.shape[1] > 1 else None
        bound = max(header.experts, granted.cell_bound)
        spec = dataclasses.replace(spec, resident=None, capacity=capacity, cell_bound=bound)
    spec = dataclasses.replace(
        spec,
        driver=driver,
        second_processor=gives_away(policies),
        costs=spec.costs if costs is None else costs,
    )
    controller = Controller(spec, policies, listener=listener)
    if not controller.writes.isdisjoint({"kv_pages", "max_running"}) and budgets is None:
        raise ValueError(
            "a policy writes 'kv_pages', and the simulator has no KV; leave it out, or give "
            "budgets=, which say when which budget is carried out"
        )
    weights, sizes = EVICTION["lru"], spec.link_bytes
    device = _device(granted, spec.resident, weights, spec.cell_bound, sizes)
    if tables is not None:
        device.tables = tables
    engine = SimulatedEngine(trace, device, controller, budgets, clock)
    return _gather(trace, engine.run(trace.step_traces()), controller, watcher)


def name_policies(
    policies: Sequence[Policy],
    eviction: str | None = None,
    prefetch: str | None = None,
    placement: str | None = None,
) -> tuple[Policy, ...]:
    """Returns all policies of a run, eviction first: the given policies and those with these names.
    Raises ValueError for an unknown name."""
    named = with_placement(placement, with_prefetch(prefetch, policies))
    return with_eviction(eviction, named)[1]


def _device_of_weights(
    header: TraceHeader,
    policies: Sequence[Policy],
    granted: PagedSpec,
    spec: Spec | None,
    *,
    as_in_trace: bool,
) -> PagerDevice:
    """Returns the device of policies that are only victim weights.

    - `as_in_trace`: whether experts are resident in the versions that the trace's run began with.
    """
    chosen = [getattr(policy, "victim_weights", None) for policy in policies]
    weights = chosen[0] if chosen and chosen[0] is not None else EVICTION["lru"]
    bound = max(header.experts, granted.cell_bound)
    if spec is not None:
        resident = spec.resident if as_in_trace else None
        return _device(granted, resident, weights, bound, spec.link_bytes)
    resident = read_resident(header.spec.get("resident")) if as_in_trace else None
    said = header.spec.get("link_bytes") or header.spec.get("version_bytes", {"": 0})
    return _device(granted, resident, weights, bound, _sizes(said, header.layers))


def _device(
    granted: PagedSpec,
    resident: ResidentSpec | None,
    weights: tuple[int, ...],
    bound: int,
    sizes: Mapping[str, np.ndarray],
) -> PagerDevice:
    """Returns a device with nothing in its cells, or with every expert resident."""
    if resident is None:
        experts = granted.fill_version.shape[1]
        tables = cold_tables(granted.cells, experts, weights, bound, granted.fill_version)
    else:
        if resident.arriving:
            raise ValueError(
                "publish=arrival: when a version arrives is measured, not simulated; use a run "
                "with publish=step"
            )
        tables = resident_tables(resident, weights)
    return PagerDevice(tables, np.stack([*sizes.values()]))


def spec_of(header: TraceHeader) -> Spec:
    """Returns the Spec that the engine which wrote a trace gave its policies. Raises TraceError if
    the header does not have all of it."""
    said = {"stage_entries": STAGE_ENTRIES, "max_num_seqs": None, **header.spec}
    try:
        sizes = _sizes(said["version_bytes"], header.layers)
        moved = said.get("link_bytes")
        largest = int(max(map(np.max, sizes.values())))
        resident, paged = read_resident(said.get("resident")), read_paged(said.get("paged"))
        mixed = resident or paged
        return Spec(
            layers=header.layers,
            experts=header.experts,
            top_k=header.top_k,
            **{name: said[name] for name in SAID},
            budget_bytes=said["slots"] * said["slot_bytes"],
            staging_bytes=2 * said["stage_entries"] * largest,
            version_bytes=sizes,
            min_cells=np.zeros(header.layers, np.int32),
            cell_bound=header.experts if mixed is None else mixed.cell_bound,
            capacity=None if mixed is None else mixed.capacity,
            resident=resident,
            moved_bytes=None if moved is None else _sizes(moved, header.layers),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"the trace's spec does not say {error}, which policies are told; give spec="
        ) from error


def _sizes(said: Mapping[str, Any], layers: int) -> dict[str, np.ndarray]:
    """Returns int64[L] bytes of each version. A header has one number, or one of each layer."""
    return {name: np.broadcast_to(np.array(size, np.int64), layers) for name, size in said.items()}


def _cells(
    header: TraceHeader, cells: int | Sequence[int] | np.ndarray | PagedSpec | None
) -> PagedSpec:
    """Returns the cells of each layer and the version that misses fill at the start, by default as
    in the trace. Misses fill version 0 if cells are of one version."""
    if isinstance(cells, PagedSpec):
        return cells
    if cells is None and "cells" not in header.spec:
        raise TraceError("the trace does not say how many cells its layers had; give cells=")
    paged = read_paged(header.spec.get("paged"))
    if cells is None and paged is not None:
        return paged
    given = np.asarray(header.spec["cells"] if cells is None else cells)
    by_version = header.layers, len(header.spec.get("version_bytes", ()))
    if given.dtype.kind not in "iu" or given.shape not in ((), (header.layers,), by_version):
        raise ValueError(
            f"cells must be an integer or {header.layers} integers, not {cells!r}; where there are "
            "several versions also [layers, versions]"
        )
    if given.min() < 0 or given.max() > header.experts:
        raise ValueError(f"cells of a layer must lie in 0…{header.experts}, not {given.tolist()}")
    given = given.astype(np.int64)
    fill_version = np.zeros((header.layers, header.experts), np.int8)
    if given.shape == by_version:
        return PagedSpec(given, fill_version if paged is None else paged.fill_version)
    return PagedSpec(np.broadcast_to(given, header.layers)[:, None], fill_version)


def _steps_without_control(
    trace: Trace, device: PagerDevice, budgets: Sequence[BudgetMove]
) -> Iterator[SimulatedStep]:
    """Yields the steps under a policy that is only weights."""
    moves = by_step(budgets)
    for step in read_step_sets(trace):
        for budget in moves.get(step.number, ()):
            device.regrant(np.array(budget.cells))
        done = device.begin_step(step.number, step.kind, step.waves)
        device.compute(step.active)
        yield done


def _gather(
    trace: Trace,
    steps: Iterator[SimulatedStep],
    controller: Controller | None,
    watcher: Callable[[SimulatedStep], None] | None,
) -> Simulation:
    total, layers = trace.steps, trace.header.layers
    counts = np.zeros((5, total, layers), np.int32)
    moved = np.zeros((total, layers), np.int64)
    number, kind = np.zeros(total, np.int64), np.zeros(total, np.int8)
    for i, step in enumerate(steps):
        number[i] = step.number
        kind[i] = -1 if step.kind is None else KINDS.index(step.kind)
        placed = np.count_nonzero(step.placed, axis=1)
        counts[:, i] = step.hits, step.fills, step.read_through, placed, step.staged
        moved[i] = step.moved
        if watcher is not None:
            watcher(step)
    known = controller is not None or "version_bytes" in trace.header.spec
    stats = None if controller is None else controller.stats()
    return Simulation(number, kind, *counts, bytes=moved if known else None, control=stats)
