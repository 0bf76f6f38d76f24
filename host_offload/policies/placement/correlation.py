"""Klotski's prediction: who was chosen most often after whom, layer by layer."""

from __future__ import annotations

import numpy as np


def successors(ids: np.ndarray, experts: int, count: int) -> np.ndarray:
    """int[L − 1, E, count]: of each expert of each layer but the last, whom its tokens chose most
    often in the next layer, the most frequent first (ties: the lower id).

    ids: int[N, L, k] of a profile. Klotski's public code counts every pair of a token's experts in
    both layers (`update_expert_popularity` in research/SYSU/Klotski/mixtral/mixtral.py of
    mindspore-lab/models, 37c216b5) and goes on counting while it runs; this does not.
    """
    layers, k = ids.shape[1:]
    found = np.zeros((layers - 1, experts, count), np.int64)
    for layer in range(layers - 1):
        before = np.repeat(ids[:, layer].astype(np.int64), k, axis=1)
        after = np.tile(ids[:, layer + 1].astype(np.int64), (1, k))
        pairs = np.bincount((before * experts + after).ravel(), minlength=experts * experts)
        order = np.argsort(-pairs.reshape(experts, experts), axis=1, kind="stable")
        found[layer] = order[:, :count]
    return found


def correlated(tokens: np.ndarray, after: np.ndarray) -> np.ndarray:
    """int[T, L, 1, E]: rows that the next layer is predicted to have, each expert's rows given to
    each of its `successors`; zeros behind the last layer. tokens: int[T, L, E]."""
    steps, layers, experts = tokens.shape
    found = np.zeros((steps, layers, 1, experts), np.int64)
    for layer in range(layers - 1):
        for rank in range(after.shape[2]):
            hits = np.zeros((experts, experts), np.int64)
            hits[np.arange(experts), after[layer, :, rank]] = 1
            found[:, layer, 0] += tokens[:, layer] @ hits
    return found
