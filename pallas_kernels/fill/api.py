from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.records.versions import Formats, check_formats


class Fills(NamedTuple):
    """Records of one layer that go into cells; entries from `count` on are ignored."""

    expert: Int[Array, " A"]
    row: Int[Array, " A"]
    """Arena row of the cell."""
    version: Int[Array, " A"]
    """Whose store the record comes from."""
    count: Int[Array, ""]
    """int32[1] in kernels."""


IMPLEMENTATIONS = implementations("fill", ("xla", "pallas", "cpu"))


def fill(
    arena: UInt16[Array, "rows D"],
    stores: tuple[UInt16[Array, "L E _ D"], ...],
    layer: Int[Array, ""] | int,
    fills: Fills,
    *,
    formats: Formats | None = None,
    ahead: bool = False,
    implementation: str = "xla",
) -> UInt16[Array, "rows D"]:
    """Copies records of one layer from pinned host memory into the arena, in place when donated.

    - `stores`: per version, all records, in pinned host memory.
    - `formats`: see VersionFormats. A record whose cell has another format than its store is
      decoded on the way. None: every version is copied unchanged.
    - `ahead`: the records are not needed yet, so a queue copies others first. Without a queue they
      are copied at once.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    if not stores:
        raise ValueError("fill needs at least one store")
    for store in stores:
        if store.ndim != 4 or store.shape[-1] != arena.shape[-1]:
            raise ValueError(f"a store is [L, E, rows, {arena.shape[-1]}], not {store.shape}")
    check_formats(formats, stores)
    fn = pick("fill", IMPLEMENTATIONS, implementation)
    said = {"ahead": True} if ahead and implementation == "cpu" else {}
    return fn(arena, stores, layer, fills, formats=formats, **said)
