"""The policies of an engine, with what they are told at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from host_offload.control.controller import Controller, Event
from host_offload.control.interface import Costs, Policy
from host_offload.control.paging import PagedSpec
from host_offload.memory.placement import ResidentSpec
from host_offload.policies.prefetch.fitted import check_fitted
from moejax.engine.control import spec_of_engine
from moejax.models.model_config import config_digest
from moejax.step.runner import Runner


def start_controller(
    runner: Runner,
    policies: Sequence[Policy],
    *,
    max_model_len: int,
    max_num_seqs: int | None = None,
    seed: int,
    routers: Sequence[jax.Array] = (),
    resident: ResidentSpec | None = None,
    paged: PagedSpec | None = None,
    costs: Costs | None = None,
    listener: Callable[[Event], None] | None = None,
) -> Controller:
    """The controller of an engine's policies. routers: of each run of MoE layers, [n, E, D], for
    policies that need them; costs likewise. resident: where every expert has a version in the
    arena. paged: where layers have cells of two versions. listener: see Controller. Raises
    ValueError for policies that cannot run."""
    router = None
    if any("router" in policy.needs for policy in policies):
        weights = np.concatenate([np.asarray(r, np.float32) for r in routers])
        router = np.swapaxes(weights, 1, 2)
    spec = spec_of_engine(runner, max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed)
    if resident is not None:
        spec = dataclasses.replace(spec, resident=resident, capacity=resident.capacity)
    if paged is not None:
        spec = dataclasses.replace(spec, capacity=paged.capacity)
    check_fitted(policies, config_digest(runner.config))
    spec = dataclasses.replace(spec, router=router, costs=costs)
    return Controller(spec, policies, listener=listener)
