from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, UInt16

from pallas_kernels.expert_ffn.api import check_operands, with_formats
from pallas_kernels.expert_ffn.epilogue import Epilogue, check_epilogue
from pallas_kernels.expert_ffn.operands import ExpertBatch, ExpertOptions, ExpertPlaces
from pallas_kernels.fill import Fills
from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("fill_ffn", ("xla", "pallas"))


def fill_ffn(
    y: Float[Array, "TK D"],
    arena: UInt16[Array, "rows D"],
    batch: ExpertBatch,
    places: ExpertPlaces,
    fills: Fills,
    options: ExpertOptions,
    epilogue: Epilogue | None = None,
) -> tuple[UInt16[Array, "rows D"], Any]:
    """`fill` of some experts, then `expert_ffn` of all active ones, to the bit. Returns (arena, y),
    both updated in place when donated.

    A plan guarantees that filled experts are active, that their address is their new cell, and that
    no filled cell belongs to another active expert. So kernels compute the others while records
    arrive.

    - `places`: with the addresses after the fills.
    - Other arguments: see expert_ffn.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation, and, from
    kernels, for versions that they do not take (why_not_pallas) and products of many rows.
    """
    check_operands(y, arena, batch, options)
    if epilogue is not None:
        check_epilogue(y, batch.ids, epilogue)
    for store in places.stores:
        if store.ndim != 4 or store.shape[-1] != arena.shape[-1]:
            raise ValueError(f"a store is [L, E, rows, {arena.shape[-1]}], not {store.shape}")
    fn = pick("fill_ffn", IMPLEMENTATIONS, options.implementation)
    options = with_formats(options, places, batch.x.dtype)
    return fn(y, arena, batch, places, fills, options, epilogue)
