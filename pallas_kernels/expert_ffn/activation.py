"""Activations by the names transformers' ACT2FN gives them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """The gating of gpt-oss (arXiv:2508.10925): (up + shift) · gate · sigmoid(alpha · gate), with
    gate at most `limit` and up within ± limit. DeepSeek-V4's has alpha 1 and shift 0."""

    limit: float
    alpha: float
    shift: float = 1.0

    def __str__(self) -> str:
        return f"swiglu {self.limit:g} {self.alpha:g} {self.shift:g}"


Activation = str | ClampedSwiGLU
"""A name of ACTIVATIONS, or a gating that is more than an activation of the gate."""

Gating = Callable[[jax.Array, jax.Array], jax.Array]
"""Products with gate and up → what goes into the product with down."""


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes into the product with down."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + activation.shift) * (gate * jax.nn.sigmoid(gate * activation.alpha))
