"""Costs of the steps of an LLM, or of a model by name (docs/explanation/cost_model.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from host_offload.sizing.cost_model import CostModel
from moejax.costs.measure import calibrate
from moejax.costs.store import find_cost_model, find_quiet_costs, identity
from moejax.errors import UserError
from moejax.serve.llm import LLM


def cost_model_for(
    llm: LLM, *, force: bool = False, report: Callable[[str], None] | None = None
) -> CostModel:
    """Returns the costs of an LLM's steps. Without kept costs, with kept ones that were measured on
    a busy machine, or with `force`, it measures and keeps them (moejax.costs.measure.calibrate).
    The LLM has its cells again afterwards. Raises UserError also for a kept file that is damaged,
    and for an LLM that has run something and has no kept costs."""
    runner = llm.engine.runner
    has_run = bool(llm.engine.statistics.requests or llm.engine.control is not None)
    find = find_cost_model if has_run else find_quiet_costs
    kept = None if force else find(identity(runner.steps))
    if kept is not None:
        return kept
    if runner.steps.in_place:
        raise UserError(
            "costs are measured with cells, and here every expert is read where it lies in the "
            "store; name an eviction (eviction='lru') to give them cells, or `moejax calibrate`"
        )
    if runner.steps.window:
        raise UserError(
            "costs are measured with cells of each layer, which driver=stream does not have; use "
            "driver='device'"
        )
    if has_run:
        raise UserError(
            "costs are measured on an LLM that has run nothing and has no policies that look "
            "at steps; call it first, or `moejax calibrate` with the same options"
        )
    granted = llm.engine.scheduler.arena.cell_row.copy()
    model = calibrate(runner, report)
    runner.grant_cells(granted)
    return model


def cost_model_of(model: str | os.PathLike[str], **options: Any) -> CostModel:
    """Returns cost_model_for of LLM(model, **options) with cells, and closes that LLM."""
    with LLM(model, progress=False, **{"eviction": "lru", **options}) as llm:
        return cost_model_for(llm)
