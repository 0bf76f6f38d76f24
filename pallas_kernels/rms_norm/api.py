from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("rms_norm", ("xla", "pallas", "cpu"))


def rms_norm(
    x: Float[Array, "*rows D"],
    weights: Float[Array, "L D"],
    layer: Int[Array, ""] | int,
    eps: float,
    *,
    implementation: str = "xla",
) -> Float[Array, "*rows D"]:
    """x / rms(x) · weights[layer] over the last axis, in float32, rounded to x's dtype before the
    weight is applied, as transformers does.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    if x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weights.shape[-1]}")
    return pick("rms_norm", IMPLEMENTATIONS, implementation)(x, weights, layer, eps)
