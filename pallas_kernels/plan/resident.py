"""The table updates of plans, for steps in which every expert is resident. Nothing is decided then,
so they are made for all layers at once after the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.plan.record import counts_size


def plan_resident(tables: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    """(tables, counts int32[L, counts_size(E)]) as plan_routed returns them for every layer, if no
    expert is absent. Residents stay; clocks, frequencies and times of last use change.

    - `ids`: int32[L, P], E for padding.
    """
    layers, experts = tables.address.shape
    # Along the pairs, as in active_experts.
    active = jnp.any(jnp.arange(experts)[:, None] == ids[:, None, :], axis=2)
    clock = tables.clock + 1
    owner = jnp.maximum(tables.owner, 0)
    # An expert may own a second cell of another version: only the one at its address counts.
    current = jnp.take_along_axis(tables.address, owner, axis=1) == tables.cell_row
    used = (tables.owner >= 0) & current & jnp.take_along_axis(active, owner, axis=1)
    tables = tables._replace(
        last_used=jnp.where(used, clock[:, None], tables.last_used),
        frequency=tables.frequency + active,
        clock=clock,
    )
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    counts = jnp.zeros((layers, counts_size(experts)), jnp.int32)
    return tables, counts.at[:, :2].set(count[:, None])  # active experts, hits
