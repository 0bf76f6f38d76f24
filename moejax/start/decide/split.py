"""The split between experts and KV that an engine starts with, if a trace, numbers or a remembered
workload say it. A remembered workload is a trace that the user registered once (`moejax plan
--trace T --remember`), kept by the model's configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from host_offload.control.interface import Costs, Spec
from host_offload.memory.budget import KV_SHARE, Budget
from host_offload.sizing.cell_allocation import allocate
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.miss_curves import trace_curves
from host_offload.sizing.split import division_of, miss_costs
from host_offload.traces.reader import Trace
from moejax.cache import cache_root, write_whole
from moejax.costs.store import find_cost_model, identity
from moejax.costs.workload_plan import open_trace
from moejax.engine.resize import check_grant
from moejax.errors import UserError, user_errors
from moejax.start.options import Config
from moejax.step.step_parts import StepSpec
from moejax.traces.tracer import config_digest

log = logging.getLogger("moejax")


class Split(NamedTuple):
    cells: tuple[int, ...]
    """Cells of each layer."""
    kv_slots: int
    note: str
    """The rule that decided the split, and its numbers, for people."""


def start_split(
    options: Config,
    budget: Budget,
    had: Sequence[int],
    spec: Spec,
    steps: StepSpec,
    costs: Costs | None,
) -> Split | None:
    """Returns the split that options, a trace or a remembered workload ask for, or None if the
    budget decides.

    - `had`: cells of each layer by the budget alone.
    - `costs`: costs of the steps, needed with a trace for `budget`.

    Raises UserError for a trace that cannot be used. A remembered trace that cannot be used is only
    noted.
    """
    wanted = options.policy.cells
    if (given := wanted.each) is not None:
        if len(given) != len(had) or sum(given) > sum(had):
            raise UserError(
                f"cells: {len(given)} numbers, {sum(given)} in all; "
                f"the model has {len(had)} layers with experts and the budget {sum(had)} cells"
            )
        return Split(given, budget.kv_slots, f"cells of each layer: {_short(given)}, as given")
    if wanted.split is not None:
        assert costs is not None
        split = _configure(options, _trace(wanted.split, spec), spec, costs)
        return split._replace(note="budget mv_wsa: " + split.note)
    if wanted.trace is not None:
        curves = trace_curves(_trace(wanted.trace, spec), kind="decode")
        found = allocate(wanted.rule, curves.misses, sum(had))
        cells = tuple(found.cells.tolist())
        note = (
            f"cells of each layer: {_short(cells)}, {wanted.rule} by the trace, "
            f"which would have missed {found.misses:.0f} of {int(curves.references.sum())}"
        )
        return Split(cells, budget.kv_slots, note)
    sizes = options.memory.expert_budget, options.memory.kv_budget
    asked = wanted.rule != "uniform" or sizes != (None, None)
    if not budget.cut or asked or len(steps.layout.records) > 1:
        return None
    return _by_rule(options, Split(tuple(had), budget.kv_slots, ""), spec, steps)


def check_split(spec: Spec, steps: StepSpec, cells: Sequence[int], kv_slots: int) -> None:
    """Raises UserError for cells and KV slots that an arena cannot have."""
    if len(steps.layout.records) > 1:
        raise UserError(
            "with two versions of the experts in memory slots do not move; leave out budget and "
            "cells, or precision"
        )
    slots = spec.budget_bytes // steps.layout.slot_bytes
    with user_errors(where="the split cannot be set: "):
        check_grant((spec.layers, spec.cell_bound), slots, list(cells), kv_slots)


def _by_rule(options: Config, had: Split, spec: Spec, steps: StepSpec) -> Split:
    """Returns the configurator's split if not everything fits and no option names a split. It uses
    the workload remembered for the model and costs measured before. Without either it returns
    `had`, the split of resolve_budget's rule."""
    rule = f"split: KV keeps at least 1/{KV_SHARE} or one sequence, experts the rest"
    try:
        directory = find_workload(config_digest(steps.config))
        if directory is None:
            none = "no workload is remembered (moejax plan --trace T --remember)"
            return had._replace(note=f"{rule}; {none}")
        trace = _trace(directory, spec)
        split = _configure(options, trace, spec, find_costs(steps))
        check_split(spec, steps, split.cells, split.kv_slots)
    except UserError as error:
        log.warning("the workload that is remembered does not split the memory: %s", error)
        note = f"{rule}; the remembered workload could not be used: {error}"
        return had._replace(note=note)
    return split._replace(note=f"split: by the remembered workload {directory}: {split.note}")


def find_costs(steps: StepSpec) -> Costs:
    """Returns the costs measured before for these steps. Raises UserError if there are none."""
    if (kept := find_cost_model(identity(steps))) is None:
        raise UserError("costs of this start were not measured: `moejax calibrate`")
    return kept.costs()


def _configure(options: Config, trace: Trace, spec: Spec, costs: Costs) -> Split:
    """Returns the split that the configurator finds."""
    with user_errors():
        prices = miss_costs(costs, spec, options.memory.kv_overflow)
    division = division_of(spec)
    with user_errors(where=f"{trace.directory}: "):
        found = configure(turns_of(trace), division, prices, allocation=options.policy.cells.rule)
    cells = tuple(found.cells.tolist())
    note = (
        f"{found.cap} cells a layer ({_short(cells)}), "
        f"{found.kv_pages} KV pages; predicted for the trace {found.expert_misses:.0f} expert "
        f"and {found.kv_misses:.0f} KV misses, {found.seconds:.3g} s"
    )
    return Split(cells, found.kv_pages // division.unit_pages, note)


def _trace(path: str, spec: Spec) -> Trace:
    trace = open_trace(path)
    if (trace.header.layers, trace.header.experts) != (spec.layers, spec.experts):
        raise UserError(
            f"{path} is of another model: {trace.header.layers} layers of {trace.header.experts} "
            f"experts, this one has {spec.layers} of {spec.experts}"
        )
    return trace


def _short(cells: Sequence[int]) -> str:
    low, high = min(cells), max(cells)
    if low == high:
        return f"{low} each"
    return ", ".join(map(str, cells)) if len(cells) <= 8 else f"{low} to {high}"


def remember(trace: Trace) -> Path:
    """Remembers a trace's directory as the workload of its model. Returns the file that keeps it;
    deleting that file forgets the workload. Raises UserError if the file cannot be written."""
    path = workload_file(trace.header.config_digest)
    write_whole(path, json.dumps({"trace": str(trace.directory.absolute())}) + "\n")
    return path


def find_workload(model: str) -> str | None:
    """Returns the directory of the remembered trace, or None without one.

    - `model`: its config_digest.

    Raises UserError for a damaged file.
    """
    path = workload_file(model)
    try:
        return str(json.loads(path.read_text())["trace"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it") from error


def workload_file(model: str) -> Path:
    """Returns the file that names the workload's trace.

    - `model`: its config_digest.
    """
    return cache_root() / "workloads" / f"{model[:32]}.json"
