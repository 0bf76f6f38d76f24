from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("layer_norm", ("xla", "pallas"))


def layer_norm(
    x: Float[Array, "*rows D"],
    weights: Float[Array, "L D"],
    biases: Float[Array, "L D"],
    layer: Int[Array, ""] | int,
    eps: float,
    *,
    implementation: str = "xla",
) -> Float[Array, "*rows D"]:
    """(x − mean(x)) / √(variance(x) + eps) · weights[layer] + biases[layer] over the last axis.
    Computed in float32 and rounded once to x's dtype, as torch.nn.LayerNorm does.

    Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    if x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weights.shape[-1]}")
    if biases.shape != weights.shape:
        raise ValueError(f"biases are {biases.shape}, the weights need {weights.shape}")
    return pick("layer_norm", IMPLEMENTATIONS, implementation)(x, weights, biases, layer, eps)
