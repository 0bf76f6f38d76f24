from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("head_linear", ("xla", "cpu", "pallas"))


def head_linear(
    x: Float[Array, "T H a"],
    weights: Float[Array, "L H n r"],
    layer: Int[Array, ""] | int,
    *,
    part: tuple[int, int] | None = None,
    transposed: bool = False,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    implementation: str = "xla",
) -> Float[Array, "T H b"]:
    """x[:, h] · Wᵀ for every head h, W being rows of weights[layer, h]. Summed in float32, returned
    in x's dtype.

    By these products multi-head latent attention reads latent KV unchanged: the up-projection of
    keys moves to the queries, and that of values to the result (DeepSeek-V2, section 2.1.2). Both
    are rows of one matrix per head, stacked over layers and passed whole, so a scan over layers
    copies nothing.

    - `part`: (first, stop) of the rows W; default: all rows.
    - `transposed`: computes x[:, h] · W.
    - `row_tile`, `tiles`: see linear.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    if not x.shape[0]:
        raise ValueError("x has no rows; head_linear needs at least one")
    row_tile = x.shape[0] if row_tile is None else row_tile
    heads, rows, inputs = weights.shape[1:]
    first, stop = (0, rows) if part is None else part
    if not 0 <= first < stop <= rows:
        raise ValueError(f"part {part} is not within {rows} rows")
    inputs = stop - first if transposed else inputs
    if x.shape[1:] != (heads, inputs):
        raise ValueError(f"x is {x.shape}, the weights need [T, {heads}, {inputs}]")
    if row_tile < 1 or x.shape[0] % row_tile:
        raise ValueError(f"{x.shape[0]} rows are not whole tiles of {row_tile}")
    tiles = x.shape[0] // row_tile if tiles is None else tiles
    fn = pick("head_linear", IMPLEMENTATIONS, implementation)
    options = dict(part=(first, stop), transposed=transposed, row_tile=row_tile, tiles=tiles)
    return fn(x, weights, layer, **options)
