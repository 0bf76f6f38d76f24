from __future__ import annotations

from jaxtyping import Array, Float, Int

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
    """(combine, index + 1): the last kernel of a layer moves the loop over layers on, in place,
    where a loop of XLA's launches a kernel for it.

    Raises as combine.
    """
    _check(residual, y, weights)
    fn = pick("combine", IMPLEMENTATIONS, implementation)
    if implementation == "pallas":
        return fn(residual, y, weights, index)
    return fn(residual, y, weights), index + 1


def _check(residual, y, weights):
    if y.shape[:2] != weights.shape or residual.shape != (y.shape[0], y.shape[2]):
        raise ValueError(f"residual {residual.shape}, y {y.shape}, weights {weights.shape}")
