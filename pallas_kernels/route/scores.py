"""A router's score of every expert."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.route.rule import RouteRule


def route_scores(logits: Float[Array, "T E"], rule: RouteRule) -> Float[Array, "T E"]:
    """The scores of all experts, before correction and groups, neither normalised nor scaled.

    Softmax or sigmoid, as the rule says. Sparsemixer ranks logits; their softmax is in that order.
    """
    if rule.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)
