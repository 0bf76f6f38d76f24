"""`policy="auto"`: which arms a start has, what they cost before anything was measured, and what an
earlier run of the model on this machine learned."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.paging import PagedSpec
from host_offload.control.rules import wants_pool
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.placement.placement_names import said
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.policies.precision.hobbit import Hobbit
from host_offload.simulate.auto import (
    EVICTIONS,
    LAYERS,
    NAME,
    SPLIT,
    Auto,
    parts_of,
    policies_of,
    versions_of,
)
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel
from moejax.cache import cache_root, write_whole
from moejax.costs.hardware import HARDWARE, hardware_of, stated_costs
from moejax.costs.store import find_cost_model, identity
from moejax.engine.drafts import Drafts
from moejax.errors import UserError
from moejax.start.choices import GATED
from moejax.start.decide.start_plan import StartPlan
from moejax.start.option_values import Cells

STREAM = (
    "policy auto: driver 'stream' brings every expert of each layer, so there is nothing to "
    "choose; driver 'device' or 'host' has arms"
)
NOTHING = "policy auto: no expert is ever evicted here, so there is nothing to choose"
TWO = "policy auto: precision says in which version each expert is, so there is nothing to choose"
PINNED = "policy auto: options say what is evicted, so there is nothing to choose"


def with_auto(plan: StartPlan) -> StartPlan:
    """Returns the plan with the policy Auto in place of what its arms decide, if the options ask
    for it and leave it something to choose; otherwise a note says why not."""
    settings, policy = plan.settings, plan.settings.options.policy
    if policy.policy is None:
        return plan
    ahead = _ahead_arms(plan)
    arms = _version_arms(plan, ahead)
    pinned = policy.eviction is not None or (settings.eviction != "lru" and not ahead)
    if pinned or not (arms or plan.cells) or min(plan.cells, default=0) >= plan.spec.experts:
        nothing = TWO if isinstance(plan.mixed, PagedSpec) else NOTHING
        if settings.options.transfer.driver.name == "stream":
            nothing = STREAM
        notes = (*plan.budget.notes, PINNED if pinned else nothing)
        return dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, notes=notes))
    cells = tuple(plan.cells)
    if arms:
        assert isinstance(plan.mixed, PagedSpec)
        cells = tuple(plan.mixed.cells[:, 0].tolist())
    else:
        arms = (*_eviction_arms(plan), *ahead)
    costs, source = _costs(plan)
    second = plan.steps.second
    same = second is None or second.same_bits
    auto = Auto(cells, costs, _link(plan), arms, source=source, same_bits=same)
    if (learned := _learned(plan)) is not None and learned["arm"] in arms:
        arm, ratios = learned["arm"], (float(learned["ratios"][0]), float(learned["ratios"][1]))
        arms = (arm, *(other for other in arms if other != arm))
        pool_s = float(learned["pool_s"])
        auto = dataclasses.replace(auto, arms=arms, ratios=ratios, pool_s=pool_s, source="learned")
    if isinstance(mixed := plan.mixed, PagedSpec):
        fill = versions_of(auto.arms[0], [*plan.spec.version_bytes])[-1]
        filled = np.where(plan.spec.has_all_versions[:, None], fill, mixed.fill_version)
        mixed = dataclasses.replace(mixed, fill_version=filled.astype(np.int8))
    decided = settings.policies if ahead else (settings.policies[0], *settings.precision.policies)
    if auto.layered:
        decided = (*decided, *(p for p in settings.policies if isinstance(p, LayerCells)))
    others = (each for each in settings.policies if not any(each is one for one in decided))
    settings = dataclasses.replace(settings, eviction=NAME, policies=(auto, *others))
    first, *more = auto.arms
    said = f"policy auto begins with {first}, by {auto.source} costs"
    notes = (*plan.budget.notes, f"{said}; other arms: {', '.join(more)}" if more else said)
    budget = dataclasses.replace(plan.budget, notes=notes)
    return dataclasses.replace(plan, settings=settings, mixed=mixed, budget=budget)


def _eviction_arms(plan: StartPlan) -> tuple[str, ...]:
    """Returns the evictions with what may move: the split unless a budget or `cells` are given, and
    cells by layer if the options name them."""
    settings, memory = plan.settings, plan.settings.options.memory
    layered = [each for each in settings.policies if isinstance(each, LayerCells)]
    others = (each for each in settings.policies if each not in layered)
    moved = any({"cells", "kv_pages"} & each.writes for each in others)
    if moved or not (layered or settings.options.policy.cells == Cells()):
        return EVICTIONS
    arms = (*EVICTIONS, f"lru{LAYERS}") if layered else EVICTIONS
    if memory.expert_budget is memory.kv_budget is None:
        # The first serves requests that need KV.
        split = (arm.removesuffix(LAYERS) + SPLIT + LAYERS * (LAYERS in arm) for arm in arms)
        arms = (*split, *arms)
    return arms


def _ahead_arms(plan: StartPlan) -> tuple[str, ...]:
    """Returns Settings.ahead_arms as the model has them, placements with all their costs."""
    settings, spec, arms = plan.settings, plan.spec, plan.settings.ahead_arms
    if plan.steps.config.routes_apart:
        arms = tuple(arm for arm in arms if arm not in GATED)
    # Cells of a pool hold one version, and none is a layer's own or goes to KV.
    uniform = settings.options.policy.cells == Cells() and _eviction_arms(plan) == EVICTIONS
    if settings.has_version_arms or not uniform:
        arms = tuple(arm for arm in arms if not any(map(wants_pool, policies_of(arm))))
    whole = next((said(p, spec) for p in settings.policies if isinstance(p, PlacementPolicy)), "")
    named = map(parts_of, arms)
    return tuple((p._replace(placement=whole) if p.placement else p).arm for p in named)


def _version_arms(plan: StartPlan, ahead: Sequence[str]) -> tuple[str, ...]:
    """Returns what misses may bring, alone and with each prefetch and placement: the whole version,
    the one of fewer bits, or what the precision says, with which prefetches cannot be if it decides
    miss by miss."""
    settings = plan.settings
    if not (settings.has_version_arms and isinstance(plan.mixed, PagedSpec)):
        return ()
    by_miss = isinstance(settings.precision.policy, Hobbit)
    brought = (*plan.spec.version_bytes, str(settings.options.policy.precision))
    every = [(parts_of(arm), each) for arm in ("lru", *ahead) for each in brought]
    return tuple(
        parts._replace(precision=each).arm
        for parts, each in every
        if not (by_miss and each == brought[-1] and parts.first not in ("lru", ""))
    )


def keep_learned(plan: StartPlan, stats: dict[str, Any] | None) -> None:
    """Keeps what a run learned, for the next start.

    - `stats`: Controller.stats(); None: no policy ran.
    """
    last = (stats or {}).get("said", {}).get(NAME)
    if last is None or not last["step_s"]:
        return
    found = {name: last[name] for name in ("arm", "ratios", "pool_s")} | {"of": _about(plan)}
    with contextlib.suppress(UserError):  # the next start learns again
        write_whole(_file(plan), json.dumps(found))


def keep_drafts(plan: StartPlan, drafts: Drafts | None) -> None:
    """Keeps what a run learned of drafts, if it chose their length under this policy."""
    if drafts is None or not _recalls(plan, drafts) or not drafts.choices:
        return
    with contextlib.suppress(UserError):  # the next start learns again
        write_whole(_file(plan, drafts), json.dumps(drafts.learned()))


def recall_drafts(plan: StartPlan, drafts: Drafts) -> None:
    """Lets drafts begin with what an earlier run learned."""
    if _recalls(plan, drafts):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            drafts.recall(json.loads(_file(plan, drafts).read_text()))


def _recalls(plan: StartPlan, drafts: Drafts) -> bool:
    return drafts.adaptive and plan.settings.options.policy.policy is not None


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


def _file(plan: StartPlan, drafts: Drafts | None = None) -> Path:
    """Returns where what was learned is kept: of the arms, or of drafts."""
    about = _about(plan)
    if drafts is not None:
        about["drafts"] = str(plan.settings.options.runtime.speculative_config)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_root() / "auto" / f"{digest[:32]}.json"


def _learned(plan: StartPlan) -> dict[str, Any] | None:
    """Returns what an earlier run kept; None if it is not there or not whole."""
    try:
        found = json.loads(_file(plan).read_text())
        whole = isinstance(found["pool_s"], float) and len(found["ratios"]) == 2
        return found if isinstance(found["arm"], str) and whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
