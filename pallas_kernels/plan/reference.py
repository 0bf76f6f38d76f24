import jax.numpy as jnp
from jax import lax

from pallas_kernels.plan.victim import victim_key


def plan(tables, layer, active):
    """plan of the api, by one-hot comparisons instead of scatters, so that a kernel can do the
    same."""

    def at(table):
        return lax.dynamic_index_in_dim(table, layer, keepdims=False)

    cell_row, cell_version, owner, last_used = map(at, tables[:4])
    address, version, frequency, fill_version, prior = map(at, tables[4:9])
    cells, experts = cell_row.shape[0], address.shape[0]
    cell, expert = jnp.arange(cells), jnp.arange(experts)
    clock = at(tables.clock) + 1

    granted = cell_row >= 0
    owned = owner >= 0
    owns = (owner[:, None] == expert) & owned[:, None]  # [C, E]
    # Only the copy the address points to is read; another version of the same expert is not pinned.
    current = owns & (cell_row[:, None] == address)
    pinned = jnp.any(current & active, axis=1)
    hit = active & (address >= 0)
    missing = active & ~hit

    # Victims: rank the candidate cells of each version.
    def of_owner(values):
        return jnp.sum(jnp.where(owns, values, 0), axis=1)

    key = victim_key(clock - last_used, of_owner(frequency), of_owner(prior), tables.victim_weights)
    candidate = granted & ~pinned
    order = owned.astype(jnp.int32), key * owned, last_used * owned, owner, cell
    cell_rank = _rank(order, candidate, cell_version)

    # The n-th miss of a version takes the n-th candidate cell of that version.
    # A missing expert is computed in the version that it would fill, with or without a cell.
    read_version = jnp.where(fill_version >= 0, fill_version, -1 - fill_version)
    wants = missing & (fill_version >= 0)
    earlier = (expert[:, None] < expert) & (fill_version[:, None] == fill_version)
    miss_rank = jnp.sum(earlier & wants[:, None], axis=0)
    match = (
        (wants[:, None] & candidate)
        & (fill_version[:, None] == cell_version)
        & (miss_rank[:, None] == cell_rank)
    )  # [E, C]
    fills = jnp.any(match, axis=1)
    taken = jnp.any(match, axis=0)

    evicted = jnp.any(current & taken[:, None], axis=0)
    new_row = jnp.sum(jnp.where(match, cell_row, 0), axis=1)
    new_owner = jnp.sum(jnp.where(match, expert[:, None], 0), axis=0)
    used = taken | pinned

    def put(table, row):
        return lax.dynamic_update_index_in_dim(table, row, layer, 0)

    updated = tables._replace(
        owner=put(tables.owner, jnp.where(taken, new_owner, owner)),
        last_used=put(tables.last_used, jnp.where(used, clock, last_used)),
        address=put(tables.address, jnp.where(fills, new_row, jnp.where(evicted, -1, address))),
        version=put(tables.version, jnp.where(missing, read_version, version)),
        frequency=put(tables.frequency, frequency + active),
        clock=put(tables.clock, clock),
    )

    (active_list,) = _compact(active, expert)
    fill_expert, fill_row, fill_list_version = _compact(fills, expert, new_row, fill_version)

    def count(mask):
        return jnp.sum(mask, dtype=jnp.int32)

    return updated, (
        active_list,
        count(active),
        fill_expert,
        fill_row,
        fill_list_version,
        count(fills),
        count(hit),
        count(missing & ~fills),
    )


def _rank(order, candidate, version):
    """int[C]: for each cell, how many candidates of its version come before it. The [C, C]
    comparison is lexicographic on the fields of `order` (free first, key, last use, owner, index),
    so equal keys never depend on a sort's stability."""
    cells = version.shape[0]
    less = jnp.zeros((cells, cells), bool)
    equal = jnp.ones((cells, cells), bool)
    for field in order:
        a, b = field[:, None], field[None, :]
        less = less | (equal & (a < b))
        equal = equal & (a == b)
    rivals = candidate[:, None] & (version[:, None] == version)
    return jnp.sum(less & rivals, axis=0)


def _compact(mask, *values):
    """Moves the entries under mask to the front; the rest is −1."""
    index = jnp.arange(mask.shape[0])
    rank = jnp.cumsum(mask) - 1
    place = mask[:, None] & (rank[:, None] == index)
    listed = index < jnp.sum(mask)
    moved = (jnp.sum(jnp.where(place, v[:, None], 0), axis=0) for v in values)
    return [jnp.where(listed, v, -1).astype(jnp.int32) for v in moved]
