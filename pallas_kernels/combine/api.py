from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.implementations import implementations, pick

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
    if y.shape[:2] != weights.shape or residual.shape != (y.shape[0], y.shape[2]):
        raise ValueError(f"residual {residual.shape}, y {y.shape}, weights {weights.shape}")
    return pick("combine", IMPLEMENTATIONS, implementation)(residual, y, weights)
