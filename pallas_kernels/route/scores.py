"""A router's score of every expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.route.rule import RouteRule


def route_scores(logits: Float[Array, "T E"], rule: RouteRule) -> Float[Array, "T E"]:
    """The scores of all experts, before correction and groups, neither normalised nor scaled.

    Softmax, sigmoid or root of softplus, as the rule says. Sparsemixer ranks logits; their softmax
    is in that order.
    """
    if rule.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    if rule.scoring == "sqrtsoftplus":
        return jnp.sqrt(jax.nn.softplus(logits))
    return jax.nn.softmax(logits, axis=-1)
