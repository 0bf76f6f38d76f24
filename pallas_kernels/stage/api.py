from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.plan import Tables
from pallas_kernels.records.versions import Formats, check_formats
from pallas_kernels.stage.reference import admitted


class Entries(NamedTuple):
    """A list of transfers, a step's input of fixed length S; int32."""

    layer: Int[Array, " S"]
    """−1: the entry is not used."""
    expert: Int[Array, " S"]
    version: Int[Array, " S"]
    cell: Int[Array, " S"]
    """Target: index into the layer's cells."""


IMPLEMENTATIONS = implementations("stage", ("xla", "pallas", "cpu"))


def stage(
    arena: UInt16[Array, "rows D"],
    tables: Tables,
    stores: tuple[UInt16[Array, "L E _ D"], ...],
    layer: Int[Array, ""] | int,
    entries: Entries,
    *,
    formats: Formats | None = None,
    implementation: str = "xla",
) -> tuple[UInt16[Array, "rows D"], Tables, Int[Array, " S"]]:
    """Carries out one layer's entries, in order, after the layer's experts were computed. Arena and
    tables are updated in place when donated.

    The host decided on tables that are a step or two old. An entry is skipped, and counted as
    skipped, if it no longer fits:

    - the cell is not granted, or holds another version than the entry's;
    - the cell's owner was used in this step (last_used = clock), so it may still be read;
    - the layer already has the expert in that version;
    - an earlier entry of this list took the cell, or staged the expert in any version;
    - expert, version or cell does not exist, or the version's store lacks the layer.

    Otherwise the cell's owner becomes absent (unless its address points elsewhere), the record is
    copied from the store, and the expert's address points to it. A copy of the expert in another
    version loses its cell, so a layer has one copy of an expert. The cell counts as last used at
    clock − 1. Frequencies stay.

    - `stores`: per version, all records, in pinned host memory.
    - `formats`: see VersionFormats. A record whose cell has another format than its store is
      decoded on the way. None: every version is copied unchanged.

    Returns (arena, tables, done int32[S]: 1 for an entry carried out, 0 for any other).

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    layers = tables.address.shape[0]
    if not stores:
        raise ValueError("stage needs at least one store")
    for store in stores:
        if store.ndim != 4 or store.shape[-1] != arena.shape[-1]:
            raise ValueError(f"a store is [L, E, rows, {arena.shape[-1]}], not {store.shape}")
        here = store.shape[:2] if formats is None else (layers, store.shape[1])
        if here != tables.address.shape:
            raise ValueError(f"a store of {store.shape[:2]}, tables of {tables.address.shape}")
    check_formats(formats, stores, layers)
    shapes = {name: field.shape for name, field in entries._asdict().items()}
    if entries.layer.ndim != 1 or len(set(shapes.values())) > 1:
        raise ValueError(f"the entries' fields are all int32[S], not {shapes}")
    fn = pick("stage", IMPLEMENTATIONS, implementation)
    return fn(arena, tables, stores, layer, entries, formats=formats)


def admit_entries(
    tables: Tables,
    layer: Int[Array, ""] | int,
    entries: Entries,
    *,
    versions: int = 1,
    formats: Formats | None = None,
) -> tuple[Tables, Int[Array, " S"]]:
    """The decisions of `stage` about one layer's entries, without copies. For a host that copies
    the records itself and computes no expert before its record is in the cell.

    Returns (tables, row int32[S]: the arena row of each entry's cell, −1: it does not fit).
    """
    after, done = admitted(tables, layer, entries, versions=versions, formats=formats)
    rows = lax.dynamic_index_in_dim(tables.cell_row, layer, keepdims=False)
    return after, jnp.where(done, rows[entries.cell], -1)
