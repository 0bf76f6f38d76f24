from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("truncate", ("xla", "pallas"))


def truncate(
    scaled: Float[Array, "R V"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    *,
    implementation: str = "xla",
) -> Int[Array, " R"]:
    """The largest distance from the likeliest token that a row keeps, as the bits of a float.

    A token's distance is −scaled. It is not negative, so its bits sort like the float. Of the
    tokens that min_p keeps, top_k keeps the top_k likeliest and all equal to the last of them. Of
    those, top_p keeps each token whose likelier tokens together have less than top_p of the
    remaining mass.

    - `scaled`: float32 logits minus the row's largest, over the temperature: 0 at the likeliest
      token.
    - `top_k`: 0 or less keeps all.
    - `top_p`: 1 keeps all.
    - `min_p`: keeps tokens at least min_p times as likely as the likeliest.

    Returns int32 [R]. Tokens of min_p with at most this distance are kept, the likeliest one
    always. If sums of masses and top_p differ only by rounding, implementations may differ.

    Raises ValueError for shapes that do not fit, another dtype, or an unknown implementation.
    """
    rows = scaled.shape[:1]
    if scaled.ndim != 2 or any(given.shape != rows for given in (top_k, top_p, min_p)):
        raise ValueError(
            f"scaled {scaled.shape}, top_k {top_k.shape}, top_p {top_p.shape} and min_p "
            f"{min_p.shape} are not [R, V] and [R]"
        )
    if scaled.dtype != "float32":
        raise ValueError(f"scaled is float32, not {scaled.dtype}")
    return pick("truncate", IMPLEMENTATIONS, implementation)(scaled, top_k, top_p, min_p)
