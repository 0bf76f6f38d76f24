from __future__ import annotations

from jax.experimental.pallas import cdiv, next_power_of_2
from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("rms_norm", ("xla", "pallas", "mosaic", "cpu"))

TILE_SQUARES = implementations("rms_norm", ("xla", "pallas"), "tile_squares")


def rms_norm(
    x: Float[Array, "*rows D"],
    weights: Float[Array, "L D"],
    layer: Int[Array, ""] | int,
    eps: float,
    *,
    implementation: str = "xla",
) -> Float[Array, "*rows D"]:
    """x / rms(x) · weights[layer] over the last axis. Computed in float32 and rounded to x's dtype
    before the weight is applied, as transformers does.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    if x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weights.shape[-1]}")
    return pick("rms_norm", IMPLEMENTATIONS, implementation)(x, weights, layer, eps)


def tile_squares(
    x: Float[Array, "T D"], tile: int, *, implementation: str = "xla"
) -> Float[Array, "T N"]:
    """float32 sums of squares of each row's N = ⌈D/tile⌉ tiles; the last tile is padded with zeros.
    A product that normalises x adds these instead of reading the row, with the same bits.

    Squares are added in one tree, neighbours first. A tile whose width is a power of two is a
    subtree, so its sum is the same wherever it is computed.

    Raises ValueError for another width of tiles or an unknown implementation.
    """
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"a tile has a power of 2 of columns, not {tile}")
    return pick("tile_squares", TILE_SQUARES, implementation)(x, tile)


def check_squares(x: Float[Array, "T D"], squares: Float[Array, "T N"]) -> None:
    """Raises ValueError unless `squares` has the shape and dtype of tile_squares of x."""
    (rows, width), count = x.shape, max(squares.shape[-1], 1)
    count = cdiv(width, next_power_of_2(cdiv(width, count)))
    if squares.shape != (rows, count) or squares.dtype != "float32":
        raise ValueError(
            f"squares are {squares.dtype} {squares.shape}, but x is {x.shape}: they are float32, "
            f"{rows} rows of {width} columns over a power of 2"
        )
