"""Whether an entry is carried out and what it changes: one formula for XLA and the kernel.

Value-level: one-hot comparisons and maxima instead of gathers and scatters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Cells(NamedTuple):
    """What one layer's entries cannot change; those a kernel pads with have row −1."""

    row: jax.Array
    """int32[C]"""
    version: jax.Array
    busy: jax.Array
    """bool[C]: the owner was used in this step."""


class Residency(NamedTuple):
    """What they change."""

    owner: jax.Array
    """int32[C]"""
    staged: jax.Array
    """int32[C]: 1 where an entry of this list was copied to."""
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
    """One entry (four scalars; due: it is this layer's, and its version exists). Returns (the
    residency after it, bool[]: it is carried out)."""
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
