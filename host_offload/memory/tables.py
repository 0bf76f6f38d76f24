"""The device's tables: where each expert is, who owns each cell, what a victim costs."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from host_offload.control.staging import Residency
from host_offload.memory.layout import DENSE
from host_offload.policies.eviction.names import victim_weights
from pallas_kernels.plan import Tables

__all__ = [
    "Tables",
    "empty_tables",
    "read_snapshot",
    "regrant",
    "snapshot",
    "with_contents",
]


def empty_tables(layers: int, experts: int, cells: int, eviction: str) -> Tables:
    """Tables of a cold start: nothing granted, nothing resident.

    cells: C, the constant upper bound of cells a layer. eviction: see
    host_offload.policies.eviction.names. Raises ValueError for an unknown eviction policy.
    """

    def full(columns: int, value: int) -> jax.Array:
        return jnp.full((layers, columns), value, jnp.int32)

    return Tables(
        cell_row=full(cells, -1),
        cell_version=full(cells, DENSE),
        owner=full(cells, -1),
        last_used=full(cells, 0),
        address=full(experts, -1),
        version=full(experts, DENSE),
        frequency=full(experts, 0),
        fill_version=full(experts, DENSE),
        prior=full(experts, 0),
        clock=jnp.zeros(layers, jnp.int32),
        victim_weights=jnp.asarray(victim_weights(eviction), jnp.int32),
    )


def regrant(tables: Tables, cell_row: jax.Array) -> Tables:
    """Tables after the cells became `cell_row` int32[L, C] (−1: not granted), between two steps.

    An expert whose cell moved or was taken away becomes absent; everything else stays resident.
    Jit-able; the tables are the only thing touched, so budgets change without recompilation.
    """
    lost = (tables.owner >= 0) & (tables.cell_row != cell_row)
    experts = jnp.arange(tables.address.shape[1])
    owns = (tables.owner[:, :, None] == experts) & (
        tables.cell_row[:, :, None] == tables.address[:, None, :]
    )
    dropped = jnp.any(owns & lost[:, :, None], axis=1)
    return tables._replace(
        cell_row=cell_row,
        owner=jnp.where(lost | (cell_row < 0), -1, tables.owner),
        address=jnp.where(dropped, -1, tables.address),
    )


def with_contents(tables: Tables, contents: Mapping[str, ArrayLike]) -> Tables:
    """Tables with other contents of some fields, int32 arrays of the same shapes."""
    # A copy, because the next step donates it.
    arrays = {name: np.array(values, np.int32) for name, values in contents.items()}
    return tables._replace(**jax.device_put(arrays, tables.clock.sharding))


def snapshot(tables: Tables) -> jax.Array:
    """All tables in one array int32[n], for one transfer to the host. Jit-able; a copy, so the
    tables may be donated afterwards."""
    return jnp.concatenate([table.reshape(-1) for table in tables])


def read_snapshot(packed: np.ndarray, tables: Tables) -> Residency:
    """The tables in a snapshot, on the host. tables: any of the same shapes."""
    sizes = [table.size for table in tables]
    parts = np.split(packed, np.cumsum(sizes)[:-1])
    return Residency(*(p.reshape(t.shape) for p, t in zip(parts, tables, strict=True)))
