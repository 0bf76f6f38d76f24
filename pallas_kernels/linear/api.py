from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cards import CLASSES
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.linear import pallas_triton
from pallas_kernels.rms_norm import check_squares, rms_norm, tile_squares

IMPLEMENTATIONS = implementations("linear", ("xla", "pallas", "cpu"))

IN_PARTS = {"pallas": pallas_triton.linear_parts}
"""Implementations whose products of few outputs are parts; of others linear is the only part."""

SQUARES_TILE = 16
"""Columns of a tile of squares beside products that are not the kernel's."""


def linear(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    *,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    residual: Float[Array, "T N"] | None = None,
    implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
) -> Float[Array, "T N"]:
    """x · weights[layer]ᵀ (+ bias[layer]), summed in float32; then, where there is one, residual +
    that, rounded to out_dtype before the sum and after it.

    weights are stacked over layers in [out, in] order and passed whole: a kernel indexes them, so
    that a scan over layers copies nothing. row_tile: rows of one product (default: all), a divisor
    of T; it decides the bits, T does not. tiles: only the first so many row tiles are needed
    (default: all); the rows after them mean nothing. out_dtype: x's by default; a residual has it.
    shared_kib: the device's `cards.shared_class`, for the kernel.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    return _linear(
        *(x, weights, layer, bias),
        row_tile=row_tile,
        tiles=tiles,
        out_dtype=out_dtype,
        residual=residual,
        implementation=implementation,
        shared_kib=shared_kib,
    )


def linear_with_squares(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    *,
    residual: Float[Array, "T N"],
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
) -> tuple[Float[Array, "T N"], Float[Array, "T C"]]:
    """(linear of x's dtype with the residual, its tile_squares): who normalises the sum next need
    not read it first. The kernel's programs make the squares of their columns, whose number
    decides C. Rows of both behind the tiles that are needed mean nothing.

    Arguments and errors: as of linear.
    """
    return _linear(
        *(x, weights, layer, bias),
        row_tile=row_tile,
        tiles=tiles,
        residual=residual,
        with_squares=True,
        implementation=implementation,
        shared_kib=shared_kib,
    )


def _linear(
    x,
    weights,
    layer,
    bias,
    *,
    row_tile,
    tiles,
    implementation,
    shared_kib,
    out_dtype=None,
    residual=None,
    norm=None,
    with_squares=False,
) -> Any:
    """linear with its arguments; norm: of the kernel. with_squares: as linear_with_squares."""
    row_tile = x.shape[0] if row_tile is None else row_tile
    _check_rows(x, weights, row_tile)
    if bias is not None and bias.shape != weights.shape[:2]:
        raise ValueError(f"bias is {bias.shape}, the weights need {weights.shape[:2]}")
    tiles = x.shape[0] // row_tile if tiles is None else tiles
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if residual is not None:
        wanted = (x.shape[0], weights.shape[1]), out_dtype
        if (residual.shape, residual.dtype) != wanted:
            raise ValueError(
                f"residual is {residual.dtype} {residual.shape}, the result {wanted[1]} {wanted[0]}"
            )
    fn = pick("linear", IMPLEMENTATIONS, implementation, shared_kib)
    options = {"row_tile": row_tile, "tiles": tiles, "out_dtype": out_dtype}
    if residual is None or implementation == "pallas":
        fused = {} if residual is None else {"residual": residual}
        fused |= {} if norm is None else {"norm": norm}
        fused |= {"with_squares": True} if with_squares else {}
        return fn(x, weights, layer, bias, **options, **fused)
    out = residual + fn(x, weights, layer, bias, **options)
    return (out, tile_squares(out, SQUARES_TILE)) if with_squares else out


def norm_linear(
    x: Float[Array, "T K"],
    norm_weights: Float[Array, "L K"],
    eps: float,
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    bias: Float[Array, "L N"] | None = None,
    *,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    squares: Float[Array, "T C"] | None = None,
    implementation: str = "xla",
    norm_implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
) -> Float[Array, "T N"]:
    """linear(rms_norm(x, norm_weights, layer, eps), weights, layer, bias), each by its
    implementation, in their bits.

    Where both are kernels and the rows are few (`pallas_triton.NORMED_ROWS`) it is one launch,
    whose programs normalise the rows that they read. squares: tile_squares of x, of tiles of any
    width, which those programs read in place of the rows, with the same bits. Other arguments and
    errors: as of both.
    """
    if _normed_within(x, norm_weights, squares, implementation, norm_implementation):
        norm = pallas_triton.Norm(norm_weights, eps, squares)
    else:
        x, norm = rms_norm(x, norm_weights, layer, eps, implementation=norm_implementation), None
    return _linear(
        *(x, weights, layer, bias),
        row_tile=row_tile,
        tiles=tiles,
        norm=norm,
        implementation=implementation,
        shared_kib=shared_kib,
    )


def linear_parts(
    x: Float[Array, "T K"],
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    *,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
) -> Float[Array, "S T N"]:
    """x · weights[layer]ᵀ as float32 parts, each over some of the depth; `sum_of_parts` says in
    which order they are added.

    For products with few outputs, such as the router's: programs that each had some outputs and
    the whole depth would be fewer than the multiprocessors. How many parts there are the
    implementation decides by N, K and row_tile alone. Arguments and errors: as of linear.
    """
    row_tile = x.shape[0] if row_tile is None else row_tile
    if implementation not in IN_PARTS:
        out = linear(
            *(x, weights, layer),
            row_tile=row_tile,
            tiles=tiles,
            out_dtype="float32",
            implementation=implementation,
            shared_kib=shared_kib,
        )
        return out[None]
    _check_rows(x, weights, row_tile)
    tiles = x.shape[0] // row_tile if tiles is None else tiles
    options = {"row_tile": row_tile, "tiles": tiles, "shared_kib": shared_kib}
    return IN_PARTS[implementation](x, weights, layer, **options)


def norm_linear_parts(
    x: Float[Array, "T K"],
    norm_weights: Float[Array, "L K"],
    eps: float,
    weights: Float[Array, "L N K"],
    layer: Int[Array, ""] | int,
    *,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    squares: Float[Array, "T C"] | None = None,
    implementation: str = "xla",
    norm_implementation: str = "xla",
    shared_kib: int = CLASSES[-1],
) -> tuple[Float[Array, "T K"], Float[Array, "S T N"]]:
    """(normed, linear_parts(normed, weights, layer)) where normed is rms_norm(x, norm_weights,
    layer, eps), each by its implementation, in their bits.

    For a norm that others than the product read too. Where both are kernels and the rows are few
    (`pallas_triton.NORMED_ROWS`) it is one launch, which writes normed beside the parts. Rows of
    normed behind the tiles that are needed mean nothing. squares: as of norm_linear. Other
    arguments and errors: as of both.
    """
    options = {"row_tile": row_tile, "tiles": tiles, "shared_kib": shared_kib}
    if _normed_within(x, norm_weights, squares, implementation, norm_implementation):
        norm, options = norm_operands(x, norm_weights, eps, weights, squares=squares, **options)
        return pallas_triton.norm_linear_parts(x, norm, weights, layer, **options)
    normed = rms_norm(x, norm_weights, layer, eps, implementation=norm_implementation)
    parts = linear_parts(normed, weights, layer, implementation=implementation, **options)
    return normed, parts


def norm_operands(
    x, norm_weights, eps: float, weights, *, row_tile, tiles, squares, shared_kib: int
) -> tuple[pallas_triton.Norm, dict[str, Any]]:
    """What pallas_triton.norm_linear_parts takes of norm_linear_parts' arguments: its norm, and its
    options. Raises as norm_linear_parts."""
    _check_norm(x, norm_weights, squares)
    row_tile = x.shape[0] if row_tile is None else row_tile
    _check_rows(x, weights, row_tile)
    tiles = x.shape[0] // row_tile if tiles is None else tiles
    options = {"row_tile": row_tile, "tiles": tiles, "shared_kib": shared_kib}
    return pallas_triton.Norm(norm_weights, eps, squares), options


def normalises_within(rows: int, implementation: str, norm_implementation: str) -> bool:
    """Whether norm_linear and norm_linear_parts of so many rows are one launch, which reads
    squares; more rows go through rms_norm, which does not."""
    few = rows <= pallas_triton.NORMED_ROWS
    return few and implementation == norm_implementation == "pallas"


def _normed_within(x, norm_weights, squares, implementation, norm_implementation) -> bool:
    """Whether a product's kernel normalises the rows that it reads."""
    _check_norm(x, norm_weights, squares)
    return normalises_within(x.shape[0], implementation, norm_implementation)


def _check_norm(x, norm_weights, squares) -> None:
    if norm_weights.shape[-1] != x.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the norm has {norm_weights.shape[-1]}")
    if squares is not None:
        check_squares(x, squares)


def _check_rows(x, weights, row_tile):
    if x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weights.shape[-1]}")
    if row_tile < 1 or x.shape[0] % row_tile:
        raise ValueError(f"{x.shape[0]} rows are not whole tiles of {row_tile}")
