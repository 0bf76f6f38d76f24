from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.expert_ffn import many_tokens
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.expert_ffn.epilogue import Epilogue, check_epilogue, combine_behind
from pallas_kernels.expert_ffn.operands import ExpertBatch, ExpertOptions, ExpertPlaces
from pallas_kernels.implementations import implementations, no_integers, pick
from pallas_kernels.records.absent import stood_in
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import VersionFormats, check_formats

IMPLEMENTATIONS = implementations("expert_ffn", ("xla", "pallas", "mosaic", "cpu"))

FUSES = {"pallas"}
"""Implementations that compute an epilogue in their own launches."""

INTEGERS = {"xla", "cpu"}
"""Implementations that have the arithmetic int8."""

SORTS = {"pallas", "mosaic"}
"""Implementations that sort the pairs of many tokens by expert."""


def expert_ffn(
    y: Float[Array, "TK D"],
    arena: UInt16[Array, "rows D"],
    batch: ExpertBatch,
    places: ExpertPlaces,
    options: ExpertOptions,
    epilogue: Epilogue | None = None,
) -> Any:
    """y[t·K + k] = down(act(gate(x[t])) · up(x[t])) of expert ids[t, k], for the active experts,
    with the biases that the records have. ClampedSwiGLU replaces act and the product behind it.

    Weights of every version are computed as they decode, in x's dtype.

    - `y`: float32, updated in place. Rows of experts that are not in `active` keep their values, so
      that several waves can fill one y.
    - `epilogue`: also computes combine_and_count of y, to the bit, and returns Combined in place of
      y. A token's experts must then be different and all active: the last of them, found by
      counting, adds up the token. Otherwise the token gets no sum and the index stays, so the loop
      never ends. Padding has weights too. The layer of `places` is index[0] + first_layer.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation.
    """
    check_operands(y, arena, batch, options)
    if epilogue is not None:
        check_epilogue(y, batch.ids, epilogue)
    fn = pick("expert_ffn", IMPLEMENTATIONS, options.implementation)
    options = with_formats(options, places, batch.x.dtype)
    if options.arithmetic != "exact" and options.implementation not in INTEGERS:
        raise ValueError(no_integers("expert_ffn", options.implementation))
    stores = stood_in(places.stores, arena, options.implementation)
    operands = y, arena, batch, places._replace(stores=stores), options
    if options.implementation in FUSES:
        return fn(*operands, epilogue)
    y = fn(*operands)
    return y if epilogue is None else combine_behind(y, epilogue, options.implementation)


def check_operands(
    y: jax.Array, arena: jax.Array, batch: ExpertBatch, options: ExpertOptions
) -> None:
    """Raises ValueError for shapes of expert_ffn that do not fit, or an unknown activation."""
    x, ids = batch.x, batch.ids
    tokens, k = ids.shape
    if x.shape[0] != tokens or y.shape != (tokens * k, x.shape[1]):
        raise ValueError(f"x {x.shape}, ids {ids.shape} and y {y.shape} do not fit together")
    if arena.shape[1] != x.shape[1]:
        raise ValueError(f"arena rows have {arena.shape[1]} elements, x has {x.shape[1]} columns")
    if isinstance(options.activation, str) and options.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"unknown activation {options.activation!r}; known: {known}")


def with_formats(options: ExpertOptions, places: ExpertPlaces, dtype: jnp.dtype) -> ExpertOptions:
    """The options with formats: those given, or one dense version.

    - `dtype`: of x.

    Raises ValueError for formats that do not fit the stores.
    """
    check_formats(options.formats, places.stores, places.address.shape[0], dtype)
    if options.formats is not None:
        return options
    (store,) = places.stores
    width = store.shape[2] * 2 // (3 * dtype.itemsize)
    dense = RecordFormat("dense", store.shape[3], width, dtype.name)
    return dataclasses.replace(options, formats=(VersionFormats(dense, dense),))


def sorted_pairs(
    ids: Int[Array, "T K"], experts: int, *, row_tile: int, implementation: str
) -> many_tokens.Pairs | None:
    """What the implementation computes from ids alone; None: nothing.

    It is the same in all waves over a layer's experts. Inside the loop over waves XLA would compute
    it again in each.
    """
    if implementation not in SORTS or row_tile < many_tokens.ROWS:
        return None
    return many_tokens.sort_pairs(ids, experts)
