import jax.numpy as jnp
from jax import lax

from pallas_kernels.fill.api import Fills
from pallas_kernels.fill.reference import fill as fill_cells
from pallas_kernels.plan.listing import count, places
from pallas_kernels.records.versions import stored_in_part
from pallas_kernels.stage.admission import Cells, Residency, admit


def stage(arena, tables, stores, layer, entries, *, formats, fill=fill_cells):
    """stage of the api. fill: copies the records of entries that are carried out."""
    cell_row = lax.dynamic_index_in_dim(tables.cell_row, layer, keepdims=False)
    tables, done = admitted(tables, layer, entries, versions=len(stores), formats=formats)
    place = places(done)
    fields = entries.expert, cell_row[entries.cell], entries.version
    expert, row, version = (field.at[place].set(field) for field in fields)
    moved = Fills(expert, row, version, count(done))
    arena = fill(arena, stores, layer, moved, formats=formats)
    return arena, tables, done.astype(jnp.int32)


def admitted(tables, layer, entries, *, versions, formats):
    """`stage` without the copies: the tables after one layer's entries, and which of them fitted,
    bool[S].

    - `versions`: number of versions.
    """

    def at(table):
        return lax.dynamic_index_in_dim(table, layer, keepdims=False)

    clock, last_used, owner, cell_row = map(
        at, (tables.clock, tables.last_used, tables.owner, tables.cell_row)
    )
    cells = Cells(cell_row, at(tables.cell_version), (owner >= 0) & (last_used == clock))
    known = (entries.version >= 0) & (entries.version < versions)
    for number in stored_in_part(formats):
        known &= (entries.version != number) | (formats[number].place(layer) >= 0)
    due = (entries.layer == layer) & known

    def carry_out(i, carry):
        before, done = carry
        entry = due[i], entries.expert[i], entries.version[i], entries.cell[i]
        after, admitted = admit(cells, before, *entry)
        return after, done.at[i].set(admitted)

    before = Residency(owner, jnp.zeros_like(owner), at(tables.address), at(tables.version))
    after, done = lax.fori_loop(0, due.size, carry_out, (before, jnp.zeros_like(due)))

    def put(table, row):
        return lax.dynamic_update_index_in_dim(table, row, layer, 0)

    tables = tables._replace(
        owner=put(tables.owner, after.owner),
        last_used=put(tables.last_used, jnp.where(after.staged > 0, clock - 1, last_used)),
        address=put(tables.address, after.address),
        version=put(tables.version, after.version),
    )
    return tables, done
