from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fill import Fills
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.plan import pallas_triton
from pallas_kernels.plan.record import active_experts, bits, record, record_size


class Tables(NamedTuple):
    """Residency tables on the device: int32, donated with the arena.

    L MoE layers, C cells a layer (a constant upper bound), E experts. A budget is a matter of
    contents: a cell that is not granted has cell_row −1.
    """

    cell_row: Int[Array, "L C"]
    """Arena row of each cell; −1: not granted."""
    cell_version: Int[Array, "L C"]
    """Version that the cell holds."""
    owner: Int[Array, "L C"]
    """Expert in the cell; −1: none."""
    last_used: Int[Array, "L C"]
    """The layer's clock when the owner was last active."""
    address: Int[Array, "L E"]
    """Arena row of the expert's record; −1: absent."""
    version: Int[Array, "L E"]
    """Version at the address; for an absent expert, the version that a read-through computes."""
    frequency: Int[Array, "L E"]
    """Steps in which the expert was active."""
    fill_version: Int[Array, "L E"]
    """Version that a miss fills; −1 − v: the expert is read through in version v, without a
    cell."""
    prior: Int[Array, "L E"]
    """A policy's score; see victim_key."""
    clock: Int[Array, " L"]
    """References of the layer so far: one per decode step, one per wave of a prefill step."""
    victim_weights: Int[Array, " 3"]
    """Weights of recency, log frequency and prior; see victim_key."""


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
    """How many active experts got no cell."""

    @property
    def fills(self) -> Fills:
        return Fills(self.fill_expert, self.fill_row, self.fill_version, self.fill_count)


IMPLEMENTATIONS = implementations("plan", ("xla", "pallas", "cpu"))

ROUTED = {"pallas": pallas_triton.plan_routed}
"""Implementation → its plan_routed; for others XLA surrounds their plan."""


def plan(
    tables: Tables,
    layer: Int[Array, ""] | int,
    active: Bool[Array, " E"],
    *,
    implementation: str = "xla",
) -> tuple[Tables, Plan]:
    """One reference of a layer to the set of `active` experts (WiSP, Algorithm 1, with read-through
    for experts that do not fit).

    Hits are marked first, and no active expert is ever a victim. Misses whose `fill_version` is not
    negative take the layer's other cells of that version, in ascending id: free cells by index,
    then owned cells by ascending (victim_key, last use, owner). Remaining misses are read through
    in the version that they would have filled, whatever was resident before.

    Returns (tables after the fills of the plan, plan).

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    layers, experts = tables.address.shape
    if active.shape != (experts,):
        raise ValueError(f"active is {active.shape}, the tables have {experts} experts")
    if tables.cell_row.shape[0] != layers:
        raise ValueError(f"{tables.cell_row.shape[0]} layers of cells, {layers} of experts")
    tables, parts = pick("plan", IMPLEMENTATIONS, implementation)(tables, layer, active)
    return tables, Plan(*parts)


def plan_routed(
    tables: Tables,
    layer: Int[Array, ""] | int,
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    records: Int[Array, "L W"],
    *,
    versions: int = 1,
    implementation: str = "xla",
) -> tuple[Tables, Int[Array, "L W"], Plan]:
    """plan for the experts that a step's tokens are routed to. Also writes the layer's record into
    its row of `records`.

    A record (W = record_size) holds the ids, the bits of the weights, and counts: active experts,
    hits, fills, experts read through; a bit for each active expert that was not resident; and, with
    several versions, the fills and read-throughs of each version.

    - `ids`: E for padding.
    - `weights`: float32, only for the record.

    Returns (tables, records, plan).

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    check_records(tables, ids.size, records, versions)
    if weights.shape != ids.shape:
        raise ValueError(f"weights are {weights.shape}, ids {ids.shape}")
    if implementation in ROUTED:
        operands = tables, layer, ids, weights, records
        tables, records, parts = ROUTED[implementation](*operands, versions=versions)
        return tables, records, Plan(*parts)
    active, missing = routed_to(tables, layer, ids)
    tables, work = plan(tables, layer, active, implementation=implementation)
    row = record(ids, weights, plan_counts(work, missing, tables, layer, versions))
    return tables, lax.dynamic_update_index_in_dim(records, row, layer, 0), work


def check_records(tables: Tables, pairs: int, records: Int[Array, "L W"], versions: int) -> None:
    """Raises ValueError for records that do not fit `pairs` (token, choice) pairs."""
    layers, experts = tables.address.shape
    wanted = layers, record_size(pairs, experts, versions)
    if records.shape != wanted:
        raise ValueError(f"records are {records.shape}, {pairs} pairs need {wanted}")


def routed_to(
    tables: Tables, layer: Int[Array, ""] | int, ids: Int[Array, "T K"]
) -> tuple[Bool[Array, " E"], Bool[Array, " E"]]:
    """(experts that some token is routed to, those of them that are absent)."""
    absent = lax.dynamic_index_in_dim(tables.address, layer, keepdims=False) < 0
    # Beside each other: the second out of the first would be a kernel of its own. Behind a border,
    # since plan changes the addresses in place: read later they would be copied.
    every = jnp.ones_like(absent)
    return lax.optimization_barrier((active_experts(ids, every), active_experts(ids, absent)))


def plan_counts(
    work: Plan,
    missing: jax.Array,
    tables: Tables,
    layer: jax.Array | int,
    versions: int,
    elsewhere: jax.Array | bool = False,
) -> Int[Array, " N"]:
    """The counts of a record, int32[counts_size].

    - `missing`: bool[E], active experts that were not resident before the plan.
    - `work`: the plan.
    - `tables`: after the plan.
    - `elsewhere`: bool[E], experts that are neither filled nor read through.
    """
    totals = work.active_count, work.hits, work.fill_count, work.read_through
    parts = [jnp.stack(totals), bits(missing)]
    if versions > 1:
        number = jnp.arange(versions)[:, None]
        filled = (work.fill_expert >= 0) & (work.fill_version == number)
        absent = missing & (tables.address[layer] < 0) & ~jnp.asarray(elsewhere)  # read through
        through = absent & (tables.version[layer] == number)
        parts += [jnp.sum(taken, axis=1, dtype=jnp.int32) for taken in (filled, through)]
    return jnp.concatenate(parts)
