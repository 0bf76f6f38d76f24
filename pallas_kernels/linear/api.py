from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, no_integers, pick
from pallas_kernels.linear import pallas_triton
from pallas_kernels.linear.coded import CodedWeights
from pallas_kernels.linear.operands import EVERY_ROW, LinearOptions, Norm, Tiling
from pallas_kernels.rms_norm import check_squares, rms_norm, tile_squares

IMPLEMENTATIONS = implementations("linear", ("xla", "pallas", "mosaic", "cpu"))

FUSES = {"pallas"}
"""Implementations that normalise x, add a residual and compute its squares in the same launch. For
others XLA does so around them."""

IN_PARTS = {"pallas": pallas_triton.linear_parts}
"""Implementation → its linear_parts; without one, the result of linear is the only part."""

NORMED_PARTS = {"pallas": pallas_triton.norm_linear_parts}
"""Implementation of both linear and rms_norm → its norm_linear_parts in one launch."""

SQUARES_TILE = 16
"""Columns of a tile of squares, for products that are not the kernel's."""


def linear(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"] | CodedWeights,
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    options: LinearOptions = EVERY_ROW,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    residual: Float[Array, "T N"] | None = None,
) -> Float[Array, "T N"]:
    """x · weights[layer]ᵀ (+ bias[layer]), summed in float32 and rounded to out_dtype. A residual
    is then added, and the sum rounded again.

    - `weights`: [layers, out, in], passed whole: a kernel indexes them by layer, so a scan over
      layers copies nothing. Weights in codes (CodedWeights) give the bits of the decoded ones.
    - `out_dtype`: of the result and the residual (default: x's).

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    operands = x, weights, layer, bias
    return _linear(*operands, options, out_dtype=out_dtype, fused=pallas_triton.Fused(residual))


def linear_with_squares(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    options: LinearOptions = EVERY_ROW,
    *,
    residual: Float[Array, "T N"],
) -> tuple[Float[Array, "T N"], Float[Array, "T C"]]:
    """linear with the residual, and tile_squares of the result, so that the next norm need not read
    it.

    Each program of the kernel computes the squares of its columns, which decides C.

    Returns (sum in x's dtype, squares). Rows past the tiles that are computed are undefined. Raises
    ValueError as linear.
    """
    fused = pallas_triton.Fused(residual, with_squares=True)
    return _linear(x, weights, layer, bias, options, fused=fused)


def _linear(
    x, weights, layer, bias, options: LinearOptions, *, fused: pallas_triton.Fused, out_dtype=None
) -> Any:
    """linear, together with what can be fused with it."""
    tiling = _check_rows(x, weights, options)
    if bias is not None and bias.shape != weights.shape[:2]:
        raise ValueError(f"bias is {bias.shape}, the weights need {weights.shape[:2]}")
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    residual = fused.residual
    if residual is not None:
        wanted = (x.shape[0], weights.shape[1]), out_dtype
        if (residual.shape, residual.dtype) != wanted:
            raise ValueError(
                f"residual is {residual.dtype} {residual.shape}, the result {wanted[1]} {wanted[0]}"
            )
    function = pick("linear", IMPLEMENTATIONS, options.implementation)
    if isinstance(weights, CodedWeights) and options.implementation != "cpu":
        if options.arithmetic != "exact" and options.implementation != "xla":
            raise ValueError(no_integers("linear", options.implementation))
        weights = weights if options.arithmetic == "int8" else weights.decode()
    operands = x, weights, layer, bias, tiling, out_dtype
    if options.implementation in FUSES:
        return function(*operands, fused)
    product = function(*operands)
    if residual is None:
        return product
    out = residual + product
    return (out, tile_squares(out, SQUARES_TILE)) if fused.with_squares else out


def norm_linear(
    x: Float[Array, "T K"],
    norm: Norm,
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    options: LinearOptions = EVERY_ROW,
) -> Float[Array, "T N"]:
    """linear(rms_norm(x, norm.weights, layer, norm.eps), weights, layer, bias, options), with the
    bits of both implementations.

    If both are kernels and the rows are few (`pallas_triton.NORMED_ROWS`) it is one launch, whose
    programs normalise the rows that they read. Raises ValueError as both.
    """
    check_norm(x, norm)
    if normalises_within(len(x), options):
        return _linear(x, weights, layer, bias, options, fused=pallas_triton.Fused(norm=norm))
    normed = rms_norm(x, norm.weights, layer, norm.eps, implementation=options.norm_implementation)
    return linear(normed, weights, layer, bias, options)


def linear_parts(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    options: LinearOptions = EVERY_ROW,
) -> Float[Array, "S T N"]:
    """x · weights[layer]ᵀ as float32 parts, each over a part of the depth. `sum_of_parts` adds them
    in a fixed order.

    This is for products with few outputs, such as the router's: with whole depths there would be
    fewer programs than multiprocessors. The number of parts depends on N, K and row_tile only.
    Raises ValueError as linear.
    """
    if options.implementation not in IN_PARTS:
        return linear(x, weights, layer, None, options, out_dtype="float32")[None]
    tiling = _check_rows(x, weights, options)
    return IN_PARTS[options.implementation](x, weights, layer, tiling)


def norm_linear_parts(
    x: Float[Array, "T K"],
    norm: Norm,
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    options: LinearOptions = EVERY_ROW,
) -> tuple[Float[Array, "T K"], Float[Array, "S T N"]]:
    """normed = rms_norm(x, norm.weights, layer, norm.eps) and linear_parts(normed, weights, layer,
    options), with the bits of both implementations.

    This is for a norm whose result other ops read too. If both are kernels and the rows are few
    (`pallas_triton.NORMED_ROWS`) it is one launch, which writes normed beside the parts.

    Returns (normed, parts). Rows of normed past the tiles that are computed are undefined. Raises
    ValueError as both.
    """
    if normalises_within(len(x), options):
        tiling = check_normed(x, norm, weights, options)
        return NORMED_PARTS[options.implementation](x, norm, weights, layer, tiling)
    check_norm(x, norm)
    normed = rms_norm(x, norm.weights, layer, norm.eps, implementation=options.norm_implementation)
    return normed, linear_parts(normed, weights, layer, options)


def normalises_within(rows: int, options: LinearOptions) -> bool:
    """Whether norm_linear and norm_linear_parts of this many rows are one launch, which can read
    squares. More rows go through rms_norm, which does not."""
    alike = options.implementation == options.norm_implementation
    return alike and options.implementation in FUSES and rows <= pallas_triton.NORMED_ROWS


def check_normed(x, norm: Norm, weights, options: LinearOptions) -> Tiling:
    """The tiling of x's rows. Raises ValueError as norm_linear_parts."""
    check_norm(x, norm)
    return _check_rows(x, weights, options)


def check_norm(x, norm: Norm) -> None:
    if norm.weights.shape[-1] != x.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the norm has {norm.weights.shape[-1]}")
    if norm.squares is not None:
        check_squares(x, norm.squares)


def _check_rows(x, weights, options: LinearOptions) -> Tiling:
    if x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weights.shape[-1]}")
    return options.tiling(x.shape[0])
