"""LLaPor's networks: what a layer's router saw and chose, to whom a later layer will choose.

Learnable Layer-aware Predictor of PreScope (section 4.2.1). One network for each layer, of one of
two shapes: layers near the input and the output have a shallow one, those between a residual block
that the gate input gates. Shapes: N rows, D hidden size, q principal components, E experts, H
width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]
"""Weights by name, numpy's or jax's: `input` [q + E, H], `output` [H, E], with a block also
`inner1`, `inner2` [H, H] and `gate` [q, H]; each with a bias, `input_bias` [H] and so on."""

Drop = Callable[[Any], Any]
"""Dropout, or nothing."""


def groups(count: int, edge: int | None = None) -> list[str]:
    """The group of each of `count` predictors: "input", "middle" or "output". edge: how many the
    first and the last group have; None: an eighth, rounded up (ours; the paper leaves it open)."""
    edge = -(-count // 8) if edge is None else edge
    return [
        "input" if i < edge else "output" if i >= count - edge else "middle" for i in range(count)
    ]


def compressed(gate_input: np.ndarray, mean: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """PCA_q(a): float32[N, q] of gate inputs float32[N, D] by a layer's mean [D] and basis [D, q],
    which also brings them to unit size."""
    return (gate_input - mean) @ basis


def routing(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """route(ids, w): float32[N, E], a row's weights where it was routed to. ids: int[N, k],
    weights: float[N, k]."""
    found = np.zeros((len(ids), experts), np.float32)
    np.put_along_axis(found, ids.astype(np.int64), weights.astype(np.float32), axis=1)
    return found


def logits(arrays: Arrays, pca: Any, route: Any, xp: ModuleType, drop: Drop = lambda x: x) -> Any:
    """float32[N, E], before the sigmoid, of PCA_q(a) [N, q] and route(ids, w) [N, E]. xp: numpy or
    jax.numpy."""

    def linear(name: str, x: Any) -> Any:
        return x @ arrays[name] + arrays[f"{name}_bias"]

    def block(name: str, x: Any) -> Any:
        """lin: Dropout(GELU(Linear(x))), GELU by its tanh."""
        x = linear(name, x)
        return drop(0.5 * x * (1 + xp.tanh(0.7978845608 * (x + 0.044715 * x * x * x))))

    z = block("input", xp.concatenate([pca, route], axis=1))
    if "gate" in arrays:
        residual = block("inner2", block("inner1", z))
        z = z + residual / (1 + xp.exp(-linear("gate", pca)))
    return linear("output", z)


def of_layer(arrays: Mapping[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """A layer's own, of arrays named LAYER.NAME."""
    prefix = f"{layer}."
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def scores(
    arrays: Mapping[str, np.ndarray], gate_input: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """float32[N, E] of a layer's arrays (of_layer), in the order of p = σ(scores). gate_input:
    float32[N, D], finite; ids, weights: [N, k]."""
    pca = compressed(gate_input, arrays["mean"], arrays["basis"])
    route = routing(ids, weights, arrays["output_bias"].size)
    return logits(arrays, pca, route, np)
