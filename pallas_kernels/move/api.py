from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.plan import Tables


class Moves(NamedTuple):
    """A list of cells to move, of fixed length S; int32."""

    layer: Int[Array, " S"]
    """−1: the entry is not used."""
    cell: Int[Array, " S"]
    """Index into the layer's cells."""
    row: Int[Array, " S"]
    """The new first arena row of the cell."""


IMPLEMENTATIONS = implementations("move", ("xla", "pallas", "cpu"), "copy")


def move(
    arena: UInt16[Array, "rows D"],
    tables: Tables,
    moves: Moves,
    *,
    record_rows: tuple[int, ...],
    implementation: str = "xla",
) -> tuple[UInt16[Array, "rows D"], Tables, Int[Array, " S"]]:
    """Copies cells with their contents to other arena rows, and updates the tables: cell_row, and
    the owner's address if it pointed to the old row. Arena and tables are updated in place when
    donated.

    An entry is skipped if its layer or cell does not exist, the cell is not granted, the record
    would leave the arena or does not move, or an earlier entry names the cell. Target places must
    be free, and must overlap neither each other nor a listed cell, since entries are copied in any
    order.

    - `record_rows`: arena rows of a record, by version number.

    Returns (arena, tables, done int32[S]: 1 for a cell moved, 0 for any other entry).

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    shapes = {name: field.shape for name, field in moves._asdict().items()}
    if moves.layer.ndim != 1 or len(set(shapes.values())) > 1:
        raise ValueError(f"the entries' fields are all int32[S], not {shapes}")
    if not record_rows:
        raise ValueError("move needs the rows of at least one version's records")
    fn = pick("move", IMPLEMENTATIONS, implementation)
    layers, cells = tables.cell_row.shape
    layer, cell = jnp.clip(moves.layer, 0, layers - 1), jnp.clip(moves.cell, 0, cells - 1)
    source, version = tables.cell_row[layer, cell], tables.cell_version[layer, cell]
    exists = (moves.layer == layer) & (moves.cell == cell) & (source >= 0)
    same = (layer[:, None] == layer) & (cell[:, None] == cell) & exists
    first = ~jnp.any(jnp.tril(same, -1), axis=1)
    rows = jnp.asarray(record_rows, jnp.int32)[version]
    inside = (moves.row >= 0) & (moves.row <= arena.shape[0] - rows) & (moves.row != source)
    done = exists & first & inside
    # The arena is copied by what the tables say before they change.
    arena = fn(arena, source, moves.row, version, done.astype(jnp.int32), record_rows)

    def put(table, index, value):
        """Writes the values of entries that are carried out, each to its own element."""
        return table.at[jnp.where(done, layer, layers), index].set(value, mode="drop")

    owner = tables.owner[layer, cell]
    owned = (owner >= 0) & (tables.address[layer, owner] == source)
    address = jnp.where(done & owned, layer, layers)
    tables = tables._replace(
        cell_row=put(tables.cell_row, cell, moves.row),
        address=tables.address.at[address, owner].set(moves.row, mode="drop"),
    )
    return arena, tables, done.astype(jnp.int32)
