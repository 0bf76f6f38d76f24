from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.combine.pallas_triton import SQUARES_TILE
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.rms_norm import tile_squares

IMPLEMENTATIONS = implementations("combine", ("xla", "pallas", "cpu"))


def combine(
    residual: Float[Array, "T D"],
    y: Float[Array, "T K D"],
    weights: Float[Array, "T K"],
    *,
    implementation: str = "xla",
) -> Float[Array, "T D"]:
    """residual + Σ_k weights[:, k] · y[:, k], k ascending, in float32, rounded once.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    _check(residual, y, weights)
    return pick("combine", IMPLEMENTATIONS, implementation)(residual, y, weights)


def combine_and_count(
    residual: Float[Array, "T D"],
    y: Float[Array, "T K D"],
    weights: Float[Array, "T K"],
    index: Int[Array, 1],
    *,
    implementation: str = "xla",
) -> tuple[Float[Array, "T D"], Int[Array, 1]]:
    """combine, and index + 1 in place: the layer's last kernel counts, so XLA's loop over layers
    needs no kernel for its index.

    Returns (combined, index). Raises as combine.
    """
    _check(residual, y, weights)
    fn = pick("combine", IMPLEMENTATIONS, implementation)
    if implementation == "pallas":
        return fn(residual, y, weights, index)
    return fn(residual, y, weights), index + 1


def combine_with_squares(
    residual: Float[Array, "T D"],
    y: Float[Array, "T K D"],
    weights: Float[Array, "T K"],
    index: Int[Array, 1] | None = None,
    *,
    implementation: str = "xla",
) -> tuple[Float[Array, "T D"], Float[Array, "T N"], Int[Array, 1] | None]:
    """combine_and_count, and the sums of squares of the result, so that the next norm need not read
    it.

    - `index`: None: nothing is counted.

    Returns (combined, squares as row_squares returns them, index). Raises as combine.
    """
    _check(residual, y, weights)
    fn = pick("combine", IMPLEMENTATIONS, implementation)
    if implementation == "pallas":
        out, squares, *after = fn(residual, y, weights, index, with_squares=True)
        return out, squares, after[0] if after else None
    out = fn(residual, y, weights)
    return out, row_squares(out), None if index is None else index + 1


def row_squares(x: Float[Array, "T D"], *, implementation: str = "xla") -> Float[Array, "T N"]:
    """The squares that combine_with_squares would return for x; used before the first layer.

    Raises ValueError for an unknown implementation.
    """
    return tile_squares(x, SQUARES_TILE, implementation=implementation)


def _check(residual, y, weights):
    if y.shape[:2] != weights.shape or residual.shape != (y.shape[0], y.shape[2]):
        raise ValueError(f"residual {residual.shape}, y {y.shape}, weights {weights.shape}")
