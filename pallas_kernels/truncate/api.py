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
    """The bits of the farthest distance from its likeliest token that a row's tokens may have.

    scaled: float32 logits less the row's largest, over the temperature: at most 0, and 0 at the
    row's likeliest token. A token's distance is −scaled, a float that is not negative, whose bits
    order as it does. Of the tokens at least min_p times as likely as the likeliest, top_k keeps the
    top_k likeliest and whatever equals the last of them, 0 or less all; of those top_p keeps each
    token such that the likelier ones together have less than top_p of the mass that is left, 1 all.

    Returns int32 [R]: tokens of min_p no farther than that are kept, the likeliest one always.
    Where sums of masses and top_p differ by no more than rounding, implementations may differ.

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
