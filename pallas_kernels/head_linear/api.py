from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("head_linear", ("xla", "cpu"))


def head_linear(
    x: Float[Array, "T H a"],
    weights: Float[Array, "L H b a"],
    layer: Int[Array, ""] | int,
    *,
    row_tile: int | None = None,
    tiles: Int[Array, ""] | int | None = None,
    implementation: str = "xla",
) -> Float[Array, "T H b"]:
    """x[:, h] · weights[layer, h]ᵀ for every head h, summed in float32, in x's dtype.

    With these products multi-head latent attention reads latent KV as it lies in the pages: the
    up-projection of keys moves to the queries, that of values to the result (DeepSeek-V2, section
    2.1.2). weights are stacked over layers in [out, in] order. row_tile, tiles: as linear's.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    row_tile = x.shape[0] if row_tile is None else row_tile
    heads, _, inputs = weights.shape[1:]
    if x.shape[1:] != (heads, inputs):
        raise ValueError(f"x is {x.shape}, the weights need [T, {heads}, {inputs}]")
    if row_tile < 1 or x.shape[0] % row_tile:
        raise ValueError(f"{x.shape[0]} rows are not whole tiles of {row_tile}")
    tiles = x.shape[0] // row_tile if tiles is None else tiles
    fn = pick("head_linear", IMPLEMENTATIONS, implementation)
    return fn(x, weights, layer, row_tile=row_tile, tiles=tiles)
