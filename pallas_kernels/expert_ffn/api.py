from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn import many_tokens
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.expert_ffn.epilogue import Epilogue, check_epilogue, combine_behind
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.records.absent import stood_in
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import Formats, VersionFormats, check_formats

IMPLEMENTATIONS = implementations("expert_ffn", ("xla", "pallas", "cpu"))


def expert_ffn(
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
    *,
    activation: str,
    row_tile: int,
    formats: Formats | None = None,
    implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
    threads: int = 0,
    pairs: many_tokens.Pairs | None = None,
    epilogue: Epilogue | None = None,
) -> Any:
    """y[t·K + k] = down(act(gate(x[t])) · up(x[t])) of expert ids[t, k], for the active experts.

    y: float32, updated in place: rows of experts that are not in `active` keep what they hold, so
    that several waves fill one y. ids: ascending within a token; E marks a padding row. address:
    arena row of each expert's record, −1: read through from stores[version], which may not be where
    that is AbsentRecords; the tables of all layers. active: the experts to compute, ascending;
    entries from active_count on are ignored.
    row_tile: rows of one product; constant for an engine, since the shape of a product decides its
    bits. formats: of the versions, see VersionFormats; None: one version, dense. Whatever its
    version, an expert's weights are computed with as they decode, in x's dtype. shared_kib: the
    device's `cards.shared_class`, for the kernels. threads: of XLA's pool, the most that
    the native op takes, so that another one can run beside; 0: all. No bit depends on it. pairs:
    what sorted_pairs made of the same ids for this implementation, where several calls share it.

    epilogue: combine_and_count of y, to the bit, which gives Combined in place of y. A token's
    experts are different ones then and all of them active, since who comes last counts them:
    otherwise nothing is added for it and the index stays, which ends no loop. Padding has weights
    too. layer: index[0] + first_layer.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation.
    """
    check_operands(y, x, ids, arena, activation)
    if epilogue is not None:
        check_epilogue(y, ids, epilogue)
    fn = pick("expert_ffn", IMPLEMENTATIONS, implementation, shared_kib)
    formats = formats_of(formats, stores, address.shape[0], x.dtype)
    stores = stood_in(stores, arena, implementation)
    part: dict[str, Any] = {"threads": threads} if implementation == "cpu" else {}
    if pairs is not None:
        part["pairs"] = pairs
    if epilogue is not None and implementation == "pallas":
        part["epilogue"] = epilogue
    y = fn(
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
        formats=formats,
        activation=ACTIVATIONS[activation],
        row_tile=row_tile,
        **part,
    )
    if epilogue is None or implementation == "pallas":
        return y
    return combine_behind(y, epilogue, implementation)


def check_operands(
    y: jax.Array, x: jax.Array, ids: jax.Array, arena: jax.Array, activation: str
) -> None:
    """Raises ValueError for shapes of expert_ffn that do not fit, or an unknown activation."""
    tokens, k = ids.shape
    if x.shape[0] != tokens or y.shape != (tokens * k, x.shape[1]):
        raise ValueError(f"x {x.shape}, ids {ids.shape} and y {y.shape} do not fit together")
    if arena.shape[1] != x.shape[1]:
        raise ValueError(f"arena rows have {arena.shape[1]} elements, x has {x.shape[1]} columns")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")


def formats_of(
    formats: Formats | None,
    stores: tuple[UInt16[Array, "L E _ D"], ...],
    layers: int,
    dtype: jnp.dtype,
) -> Formats:
    """The formats given, or those of one version, dense. layers: L of the tables; dtype: of x.
    Raises ValueError where they are not those of the stores."""
    check_formats(formats, stores, layers, dtype)
    if formats is not None:
        return formats
    (store,) = stores
    width = store.shape[2] * 2 // (3 * dtype.itemsize)
    dense = RecordFormat("dense", store.shape[3], width, dtype.name)
    return (VersionFormats(dense, dense),)


def sorted_pairs(
    ids: Int[Array, "T K"], experts: int, *, row_tile: int, implementation: str
) -> many_tokens.Pairs | None:
    """What the implementation makes of ids alone, which is the same in all waves over a layer's
    experts: in a loop over them XLA would make it anew in each. None: nothing."""
    if implementation != "pallas" or row_tile < many_tokens.ROWS:
        return None
    return many_tokens.sort_pairs(ids, experts)
