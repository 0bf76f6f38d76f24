from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn.api import check_operands, formats_of
from pallas_kernels.expert_ffn.epilogue import Epilogue, check_epilogue
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.records.versions import Formats

IMPLEMENTATIONS = implementations("fill_ffn", ("xla", "pallas"))


def fill_ffn(
    y: Float[Array, "TK D"],
    x: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    arena: UInt16[Array, "rows D"],
    stores: tuple[UInt16[Array, "L E _ D"], ...],
    layer: Int[Array, ""] | int,
    address: Int[Array, "L E"],
    version: Int[Array, "L E"],
    active: Int[Array, " A"],
    active_count: Int[Array, ""],
    fill_expert: Int[Array, " A"],
    fill_row: Int[Array, " A"],
    fill_version: Int[Array, " A"],
    fill_count: Int[Array, ""],
    *,
    activation: str,
    row_tile: int,
    formats: Formats | None = None,
    implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
    epilogue: Epilogue | None = None,
) -> tuple[UInt16[Array, "rows D"], Any]:
    """(arena, y): `fill` of some experts and then `expert_ffn` of all active ones, to the bit.

    y … active_count, activation, row_tile, formats, shared_kib, epilogue: as of expert_ffn, with
    the address that an expert has after the fills. fill_expert, fill_row, fill_version: as of fill;
    entries from fill_count on are ignored. What makes it one op is what a plan promises: experts
    that are filled are active, have their new cell as address, and no cell that is filled is
    another active expert's. So others can be computed while records are on their way. Arena and y
    are updated in place when donated.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation, and from
    kernels for versions that they do not take (why_not_pallas) and products of many rows.
    """
    check_operands(y, x, ids, arena, activation)
    if epilogue is not None:
        check_epilogue(y, ids, epilogue)
    for store in stores:
        if store.ndim != 4 or store.shape[-1] != arena.shape[-1]:
            raise ValueError(f"a store is [L, E, rows, {arena.shape[-1]}], not {store.shape}")
    fn = pick("fill_ffn", IMPLEMENTATIONS, implementation, shared_kib)
    formats = formats_of(formats, stores, address.shape[0], x.dtype)
    return fn(
        y,
        x,
        ids,
        arena,
        stores,
        layer,
        address,
        version,
        active,
        active_count,
        fill_expert,
        fill_row,
        fill_version,
        fill_count,
        formats=formats,
        activation=activation,
        row_tile=row_tile,
        epilogue=epilogue,
    )
