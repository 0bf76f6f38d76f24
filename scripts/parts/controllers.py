"""Controllers of policies that are not those an engine started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Costs, Policy
from host_offload.memory.placement import ResidentSpec
from host_offload.policies.prefetch.fitted import check_fitted
from moejax.engine.control import spec_of_engine
from moejax.models.model_config import config_digest
from moejax.step.executor import Executor


def start_controller(
    runner: Executor,
    policies: Sequence[Policy],
    *,
    max_model_len: int,
    seed: int,
    routers: Sequence[jax.Array] = (),
    resident: ResidentSpec | None = None,
    costs: Costs | None = None,
) -> Controller:
    """A controller of these policies on a runner. routers: of each run of MoE layers, [n, E, D],
    for policies that need them; costs likewise. resident: where every expert has a version in the
    arena. Raises ValueError for policies that cannot run."""
    router = None
    if any("router" in policy.needs for policy in policies):
        weights = np.concatenate([np.asarray(r, np.float32) for r in routers])
        router = np.swapaxes(weights, 1, 2)
    check_fitted(policies, config_digest(runner.config))
    spec = spec_of_engine(runner, max_model_len=max_model_len, seed=seed)
    if resident is not None:
        spec = dataclasses.replace(spec, resident=resident, capacity=resident.capacity)
    return Controller(dataclasses.replace(spec, router=router, costs=costs), policies)
