"""Deliberate mistakes around an implementation of plan, which its contract test must catch."""

import jax.numpy as jnp


def reversed_experts(plan, tables, layer, active):
    """Misses take cells by descending id."""

    def mirror(tables):
        of_experts = ("address", "version", "frequency", "fill_version", "prior")
        flipped = {name: getattr(tables, name)[:, ::-1] for name in of_experts}
        owner = tables.owner
        last = tables.address.shape[1] - 1
        return tables._replace(owner=jnp.where(owner >= 0, last - owner, -1), **flipped)

    experts = active.size
    tables, parts = plan(mirror(tables), layer, active[::-1])
    listed, count, expert, row, version, *counts = parts

    def back(ids, count, *others):
        place = (count - 1 - jnp.arange(experts)) % experts
        live = jnp.arange(experts) < count
        ids = jnp.where(live, experts - 1 - ids[place], -1)
        return ids, *(jnp.where(live, other[place], -1) for other in others)

    (listed,) = back(listed, count)
    expert, row, version = back(expert, counts[0], row, version)
    return mirror(tables), (listed, count, expert, row, version, *counts)


def misses_first(plan, tables, layer, active):
    """Victims are chosen before the hits are touched: a needed expert may go."""
    hit = active & (tables.address[layer] >= 0)
    tables, parts = plan(tables, layer, active & ~hit)
    frequency = tables.frequency.at[layer].add(hit)
    owner, active_count = tables.owner[layer], jnp.sum(active)
    used = jnp.any((owner[:, None] == jnp.arange(active.size)) & hit, axis=1)
    last_used = jnp.where(used, tables.clock[layer], tables.last_used[layer])
    tables = tables._replace(
        frequency=frequency, last_used=tables.last_used.at[layer].set(last_used)
    )
    listed = jnp.nonzero(active, size=active.size, fill_value=-1)[0].astype(jnp.int32)
    parts = (listed, active_count.astype(jnp.int32), *parts[2:6], jnp.sum(hit), parts[7])
    return tables, parts


def keeps_the_victims_address(plan, tables, layer, active):
    after, parts = plan(tables, layer, active)
    return after._replace(
        address=jnp.where(after.address < 0, tables.address, after.address)
    ), parts


def ignores_do_not_cache(plan, tables, layer, active):
    cached = tables._replace(fill_version=jnp.maximum(tables.fill_version, 0))
    after, parts = plan(cached, layer, active)
    return after._replace(fill_version=tables.fill_version), parts


def ignores_cell_versions(plan, tables, layer, active):
    flat = tables._replace(
        cell_version=tables.cell_version * 0, fill_version=tables.fill_version * 0
    )
    after, parts = plan(flat, layer, active)
    kept = dict(cell_version=tables.cell_version, fill_version=tables.fill_version)
    return after._replace(**kept), parts


def evicts_the_most_valuable(plan, tables, layer, active):
    weights = tables.victim_weights
    after, parts = plan(tables._replace(victim_weights=-weights), layer, active)
    return after._replace(victim_weights=weights), parts


def uses_ungranted_cells(plan, tables, layer, active):
    wide = tables._replace(cell_row=jnp.maximum(tables.cell_row, 0))
    after, parts = plan(wide, layer, active)
    return after._replace(cell_row=tables.cell_row), parts


MUTANTS = (
    reversed_experts,
    misses_first,
    keeps_the_victims_address,
    ignores_do_not_cache,
    ignores_cell_versions,
    evicts_the_most_valuable,
    uses_ungranted_cells,
)
