"""The settings that options stand for, before a model is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from host_offload.control.interface import Policy
from host_offload.control.rules import search_of, wants_pool
from host_offload.policies.precision.precision_names import Precision
from host_offload.policies.prefetch.fluxmoe import FluxMoE
from host_offload.policies.recorded import RecordedPolicy
from host_offload.simulate.auto import PLACED
from moejax.start.option_values import Driver
from moejax.start.options import Config

PACKED_AS = "lossless12"
"""The version of packed resident experts, with tiers."""

GATED = "fate", "mixtral-offloading"
"""Prefetches by routers, which read what the routers read."""
AHEAD = frozenset({"stages", "victim_weights", "prior", "execute", "load_order"})
"""What prefetches and placements decide."""


def _decides_more(policy: Policy) -> bool:
    """Whether a policy decides what no prefetch or placement of auto may, or repeats a run."""
    repeats, searches = isinstance(policy, RecordedPolicy), search_of([policy]) is not None
    pools = wants_pool(policy) and not isinstance(policy, FluxMoE)
    return repeats or searches or pools or not policy.writes <= AHEAD


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that options decide without a model."""

    options: Config
    precision: Precision
    eviction: str
    """The name of the eviction policy."""
    policies: tuple[Policy, ...]
    """The policies of eviction, prefetch, precision and resizes, and the user's own policies."""
    ops: Mapping[str, str]
    trace_arrays: frozenset[str]
    """The optional arrays that the trace records."""
    placement: str | None = None
    """The placement's name with all costs that the options state; None: no placement."""

    def of_model(self, *versions: str) -> Settings:
        """The settings with a checkpoint whose experts are in these versions."""
        return dataclasses.replace(self, precision=self.precision.of_model(*versions))

    @property
    def tiers(self) -> Driver | None:
        """The driver whose tiers hold the resident experts, with driver="stream"; None: no expert
        is packed."""
        driver = self.options.transfer.driver
        return None if driver.tiers is None else driver

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that the store needs."""
        packed = () if self.tiers is None else (PACKED_AS,)
        return *self.precision.versions, *packed

    @property
    def needs_costs(self) -> bool:
        """Whether a decision depends on costs. They are measured if none are kept."""
        asked = any("costs" in policy.needs for policy in self.policies)
        return asked or self.options.policy.cells.split is not None

    @property
    def has_version_arms(self) -> bool:
        """Whether `policy="auto"` may choose what misses bring: where experts are paged in two
        versions and a policy that an option names decides which. No arm can name another one's
        policy."""
        policy, precision = self.options.policy, self.precision
        decided = precision.mixed and precision.paged and precision.policy is not None
        return policy.policy == "auto" and decided and isinstance(policy.precision, str)

    @property
    def ahead_arms(self) -> tuple[str, ...]:
        """The prefetches and placements among which `policy="auto"` may choose: where policies look
        between layers and nothing else decides what moves. Those that the options name or, if they
        name none, prefetches that need no preparation."""
        policy, driver = self.options.policy, self.options.transfer.driver.name
        free = policy.policy == "auto" and policy.eviction is None and driver == "host"
        known = len(self.precision.versions) == 1 or self.has_version_arms
        others = (each for each in self.policies if each not in self.precision.policies)
        if not (free and known) or policy.policies or any(map(_decides_more, others)):
            return ()
        prefetch, placement = policy.prefetch, self.placement
        if prefetch is placement is None:
            return *GATED, "tokens", "layer-streaming"
        placed = None if placement is None else f"{PLACED}{placement}"
        named = [arm for arm in (prefetch, placed) if arm is not None]
        return (*named, "+".join(named)) if len(named) > 1 else tuple(named)

    def budget_stats(self) -> dict[str, Any]:
        """The rules that divide memory between experts and KV, as plain data."""
        policy = self.options.policy
        budget = "fixed" if policy.cells.split is None else "mv_wsa"
        return {"budget": budget, "resize": policy.resize, "cells": policy.cells.rule}
