from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from pallas_kernels.implementations import implementations, pick


class Tables(NamedTuple):
    """What the device knows about residency: int32, donated with the arena.

    L layers (counted over MoE layers), C cells a layer (a constant upper bound), E experts.
    Budgets are contents: a cell that is not granted has cell_row −1.
    """

    cell_row: Int[Array, "L C"]
    """Arena row of each cell; −1: not granted."""
    cell_version: Int[Array, "L C"]
    """Version a cell holds."""
    owner: Int[Array, "L C"]
    """Expert in the cell; −1: none."""
    last_used: Int[Array, "L C"]
    """The layer's clock when the owner was last active."""
    address: Int[Array, "L E"]
    """Arena row of the expert's record; −1: absent."""
    version: Int[Array, "L E"]
    """Version the address points to; of an absent expert the one that a read-through computes."""
    frequency: Int[Array, "L E"]
    """Steps in which the expert was active."""
    fill_version: Int[Array, "L E"]
    """Version a miss fills; −1 − v: do not cache, read version v through."""
    prior: Int[Array, "L E"]
    """A policy's score, see victim_key."""
    clock: Int[Array, " L"]
    """References of the layer so far: one per step, in prefill one per wave."""
    victim_weights: Int[Array, " 3"]
    """Weights over recency, log frequency and prior, see victim_key."""


class Plan(NamedTuple):
    """What one layer does in one step (or wave). A = E entries; lists are padded with −1."""

    active: Int[Array, " A"]
    """Active experts, ascending."""
    active_count: Int[Array, ""]
    fill_expert: Int[Array, " A"]
    """Experts to move into cells, ascending."""
    fill_row: Int[Array, " A"]
    fill_version: Int[Array, " A"]
    fill_count: Int[Array, ""]
    hits: Int[Array, ""]
    read_through: Int[Array, ""]
    """Active experts that got no cell."""


IMPLEMENTATIONS = implementations("plan", ("xla", "pallas", "cpu"))


def plan(
    tables: Tables,
    layer: Int[Array, ""] | int,
    active: Bool[Array, " E"],
    *,
    implementation: str = "xla",
) -> tuple[Tables, Plan]:
    """One reference of one layer to the set of `active` experts (WiSP, Algorithm 1, with
    read-through for what does not fit).

    Hits are touched first; no active expert is ever a victim. Misses whose `fill_version` is not
    negative take, in ascending id, the layer's unpinned cells of that version: free ones by index,
    then owned ones by ascending (victim_key, last use, owner). Misses left over are read through,
    in the version that they would have filled: whatever was resident before does not matter. The
    returned tables describe the state after the fills of the returned plan.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    layers, experts = tables.address.shape
    if active.shape != (experts,):
        raise ValueError(f"active is {active.shape}, the tables have {experts} experts")
    if tables.cell_row.shape[0] != layers:
        raise ValueError(f"{tables.cell_row.shape[0]} layers of cells, {layers} of experts")
    tables, parts = pick("plan", IMPLEMENTATIONS, implementation)(tables, layer, active)
    return tables, Plan(*parts)
