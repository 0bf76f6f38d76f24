"""What plans leave behind where every expert is resident: nothing is to be decided, so it is done
for all layers at once, behind a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.plan.record import counts_size


def plan_resident(tables: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    """(tables, counts int32[L, counts_size(E)]) as plan_routed leaves them of every layer, given
    ids int32[L, P] (E for padding) of each and that none is absent.

    Residents stay where they are; clocks, frequencies and times of last use move on.
    """
    layers, experts = tables.address.shape
    # Along the pairs, as in active_experts.
    active = jnp.any(jnp.arange(experts)[:, None] == ids[:, None, :], axis=2)
    clock = tables.clock + 1
    owner = jnp.maximum(tables.owner, 0)
    # An expert may own a second cell, of another version: only what its address points to is read.
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
