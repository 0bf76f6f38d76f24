"""Co-activation: which experts tokens use together, and what that predicts (WiSP, Appendix C)."""

from __future__ import annotations

import numpy as np

REACH = 4
"""Layers that are looked back."""


def pair_counts(source: np.ndarray, chosen: np.ndarray, experts: int) -> np.ndarray:
    """int64[E, E]: how many tokens used i in one layer and j in another, of ids int[N, k] of both.

    Without a product of matrices: numpy's BLAS works with threads that wait for each other, and on
    cores that are busy with transfers and a step a product of 0.02 ms then takes 30."""
    pairs = source[:, :, None].astype(np.int64) * experts + chosen[:, None, :]
    return np.bincount(pairs.ravel(), minlength=experts * experts).reshape(experts, experts)


def coactivation_counts(ids: np.ndarray, experts: int, reach: int = REACH) -> np.ndarray:
    """float32[L, reach, E, E]: n[(l − 1 − d, i) → (l, j)] at [l, d, i, j], tokens that used expert
    i in the layer d + 1 before l, and j in l. ids int[N, L, k]: what each token was routed to."""
    layers = ids.shape[1]
    pairs = np.zeros((layers, reach, experts, experts), np.float32)
    for layer in range(1, layers):
        for d in range(min(reach, layer)):
            pairs[layer, d] = pair_counts(ids[:, layer - 1 - d], ids[:, layer], experts)
    return pairs


def likelihoods(pairs: np.ndarray, top_k: int) -> np.ndarray:
    """float[E, E]: P(j | i) by counts [E, E]. Every token chooses top-k experts, so the sum over j
    counts each use of i so often."""
    alone = pairs.sum(axis=1, keepdims=True) / top_k
    return np.divide(pairs, alone, out=np.zeros_like(pairs), where=alone > 0)


def predicted_use(
    pairs: np.ndarray, top_k: int, *, decay: float = 0.5, first: np.ndarray | None = None
) -> np.ndarray:
    """float64[L, E]: shares of each layer's use by co-activation counts, rows sum to 1: the score
    of j is Σ over the layers d + 1 before of decay^d · Σ_i use(i)·P(j|i).

    pairs: float[L, reach, E, E], of one user or of all. first float[E]: how a user's tokens use the
    first layer; None: as in the counts. So counts of everybody and the little that is known of a
    user say what the user will need.

    Raises ValueError where a layer has no counts: the predictor is empty there.
    """
    layers, reach, experts, _ = pairs.shape
    counts = np.asarray(pairs, np.float64)
    if layers < 2 or not counts[1:, 0].any(axis=(1, 2)).all():
        raise ValueError(
            "the co-activation counts are empty in some layer (or there is only one layer); fit "
            "them on a trace: policies.coactivation.fit"
        )
    use = np.zeros((layers, experts))
    use[0] = counts[1, 0].sum(axis=1) if first is None else np.asarray(first, np.float64)
    use[0] /= use[0].sum()
    for layer in range(1, layers):
        for d in range(min(reach, layer)):
            use[layer] += decay**d * (use[layer - 1 - d] @ likelihoods(counts[layer, d], top_k))
        # Experts that were never seen predict nothing; a user of only such ones is unknown.
        total = use[layer].sum()
        use[layer] = use[layer] / total if total else 1 / experts
    return use
