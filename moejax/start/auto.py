"""`policy="auto"`: which arms a start has, what they cost before anything was measured, and what an
earlier run of the model on this machine learned."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from host_offload.control.paging import PagedSpec
from host_offload.simulate.auto import EVICTIONS, NAME, SPLIT, Auto
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel
from moejax.cache import cache_root, write_whole
from moejax.costs.hardware import HARDWARE, hardware_of, stated_costs
from moejax.costs.store import find_cost_model, identity
from moejax.errors import UserError
from moejax.start.decide.start_plan import StartPlan
from moejax.start.option_values import Cells

NOTHING = "policy auto: no expert is ever evicted here, so there is nothing to choose"
TWO = "policy auto: layers have cells of two versions, for which it has no choices"
PINNED = "policy auto: the eviction is given, so there is nothing to choose"


def with_auto(plan: StartPlan) -> StartPlan:
    """Returns the plan with the policy Auto in place of its eviction, if the options ask for it and
    leave it something to choose; otherwise a note says why not."""
    settings, policy = plan.settings, plan.settings.options.policy
    if policy.policy is None:
        return plan
    pinned = policy.eviction is not None or settings.eviction != "lru"
    if pinned or not plan.cells or min(plan.cells) >= plan.spec.experts:
        nothing = TWO if isinstance(plan.mixed, PagedSpec) else NOTHING
        notes = (*plan.budget.notes, PINNED if pinned else nothing)
        return dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, notes=notes))
    memory, arms = settings.options.memory, EVICTIONS
    moved = any({"cells", "kv_pages"} & each.writes for each in settings.policies)
    given = moved or policy.cells != Cells()
    if memory.expert_budget is memory.kv_budget is None and not given:
        arms = (*(arm + SPLIT for arm in arms), *arms)  # the first serves requests that need KV
    if not plan.steps.config.routes_apart:
        arms = (*arms, *settings.prefetch_arms)
    costs, source = _costs(plan)
    auto = Auto(tuple(plan.cells), costs, _link(plan), arms, source=source)
    if (learned := _learned(plan)) is not None and learned["arm"] in arms:
        arm, ratios = learned["arm"], (float(learned["ratios"][0]), float(learned["ratios"][1]))
        arms = (arm, *(other for other in arms if other != arm))
        auto = dataclasses.replace(auto, arms=arms, ratios=ratios, source="learned")
    policies = (auto, *settings.policies[1:])  # the eviction is the first
    settings = dataclasses.replace(settings, eviction=NAME, policies=policies)
    return dataclasses.replace(plan, settings=settings)


def keep_learned(plan: StartPlan, stats: dict[str, Any] | None) -> None:
    """Keeps what a run learned, for the next start.

    - `stats`: Controller.stats(); None: no policy ran.
    """
    said = (stats or {}).get("said", {}).get(NAME)
    if said is None or not said["step_s"]:
        return
    found = {"arm": said["arm"], "ratios": said["ratios"], "of": _about(plan)}
    with contextlib.suppress(UserError):  # the next start learns again
        write_whole(_file(plan), json.dumps(found))


def _costs(plan: StartPlan) -> tuple[CostModel, str]:
    """Returns (costs, where they are from): kept measurements of these steps, or stated figures of
    the hardware."""
    steps, spec = plan.steps, plan.spec
    with contextlib.suppress(UserError):  # damaged
        if (kept := find_cost_model(identity(steps))) is not None:
            return kept, "measured"
    known = hardware_of(steps.device_kind)
    name = next((n for n, figures in HARDWARE.items() if figures is known), "CPU DDR4")
    sizes = {"layers": spec.layers, "experts": spec.experts, "top_k": spec.top_k}
    rows = max(steps.shapes.buckets or (steps.shapes.rows,))
    record = steps.layout.records[0].nbytes
    return stated_costs(name, **sizes, expert_bytes=record, rows=rows), "stated"


def _link(plan: StartPlan) -> Link | None:
    """Returns the stated link of a queue."""
    queue = plan.steps.queue
    if queue is None or not queue.rate:
        return None
    return Link(queue.rate, queue.latency, queue.chunk_bytes or 1 << 20)


def _about(plan: StartPlan) -> dict[str, Any]:
    link = plan.spec.link
    return {**identity(plan.steps), "cells": list(plan.cells), "link": link and list(link)}


def _file(plan: StartPlan) -> Path:
    digest = hashlib.sha256(json.dumps(_about(plan), sort_keys=True).encode()).hexdigest()
    return cache_root() / "auto" / f"{digest[:32]}.json"


def _learned(plan: StartPlan) -> dict[str, Any] | None:
    """Returns what an earlier run kept; None if it is not there or not whole."""
    try:
        found = json.loads(_file(plan).read_text())
        return found if isinstance(found["arm"], str) and len(found["ratios"]) == 2 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
