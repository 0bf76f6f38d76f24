"""Whether an entry is carried out, and what it changes: one formula for XLA and the kernel.

It uses one-hot comparisons and maxima instead of gathers and scatters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Cells(NamedTuple):
    """What a layer's entries do not change. A kernel's padding has row −1."""

    row: jax.Array
    """int32[C]"""
    version: jax.Array
    busy: jax.Array
    """bool[C]: whether the owner was used in this step."""


class Residency(NamedTuple):
    """What a layer's entries change."""

    owner: jax.Array
    """int32[C]"""
    staged: jax.Array
    """int32[C]: 1 if an entry of this list was copied to the cell."""
    address: jax.Array
    """int32[E]"""
    version: jax.Array
    """int32[E]"""


def admit(
    cells: Cells,
    before: Residency,
    due: jax.Array,
    expert: jax.Array,
    version: jax.Array,
    cell: jax.Array,
) -> tuple[Residency, jax.Array]:
    """Decides one entry, given as scalars.

    - `due`: whether the entry is for this layer and its version exists.

    Returns (residency after it, bool[]: whether it is carried out).
    """
    cell_index, expert_index = (jnp.arange(x.shape[0]) for x in (before.owner, before.address))
    here, wanted = cell_index == cell, expert_index == expert
    staged, holds = before.staged > 0, before.owner == expert

    def some(mask):
        return jnp.max(mask.astype(jnp.int32)) > 0

    def of_cell(values):
        return jnp.max(jnp.where(here, values, -1))

    fits = here & (cells.row >= 0) & (cells.version == version) & ~cells.busy & ~staged
    has = holds & ((cells.version == version) | staged)
    done = due & some(fits) & some(wanted) & ~some(has)

    row, old_owner = of_cell(cells.row), of_cell(before.owner)
    evicted = (expert_index == old_owner) & (before.address == row)
    after = Residency(
        owner=jnp.where(here, expert, jnp.where(holds, -1, before.owner)),
        staged=jnp.where(here, 1, before.staged),
        address=jnp.where(wanted, row, jnp.where(evicted, -1, before.address)),
        version=jnp.where(wanted, version, before.version),
    )
    kept = (jnp.where(done, a, b) for a, b in zip(after, before, strict=True))
    return Residency(*kept), done
