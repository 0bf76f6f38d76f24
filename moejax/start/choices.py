"""The settings that options stand for, before a model is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from host_offload.control.interface import Policy
from host_offload.policies.precision.precision_names import Precision
from moejax.errors import user_errors
from moejax.start.option_values import Driver
from moejax.start.options import Config

PACKED_AS = "lossless12"
"""The version of packed resident experts, with tiers."""


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
        """The settings with a checkpoint whose experts are in these versions. Raises UserError as
        Precision.of_model does."""
        with user_errors():
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
    def prefetch_arms(self) -> tuple[str, ...]:
        """The prefetches among which `policy="auto"` may choose: where the driver has their moments
        and nothing else decides eviction or prefetch."""
        policy, driver = self.options.policy, self.options.transfer.driver.name
        free = policy.policy == "auto" and policy.eviction is policy.prefetch is None
        alone = len(self.policies) == 1 and len(self.precision.versions) == 1
        return ("fate", "mixtral-offloading") if free and alone and driver == "host" else ()

    def budget_stats(self) -> dict[str, Any]:
        """The rules that divide memory between experts and KV, as plain data."""
        policy = self.options.policy
        budget = "fixed" if policy.cells.split is None else "mv_wsa"
        return {"budget": budget, "resize": policy.resize, "cells": policy.cells.rule}
