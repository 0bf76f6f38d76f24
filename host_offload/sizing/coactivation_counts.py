"""Co-activation: which experts tokens use together, and the use that this predicts (WiSP, Appendix
C)."""

from __future__ import annotations

import numpy as np

REACH = 4
"""Earlier layers that a prediction uses."""


def pair_counts(source: np.ndarray, chosen: np.ndarray, experts: int) -> np.ndarray:
    """Returns how many tokens used i in one layer and j in another, int64[E, E].

    - `source`, `chosen`: ids int[N, k] of both layers.

    It avoids a product of matrices: the threads of numpy's BLAS wait for each other, and on cores
    that are busy with transfers and a step a product of 0.02 ms then takes 30 ms.
    """
    pairs = source[:, :, None].astype(np.int64) * experts + chosen[:, None, :]
    return np.bincount(pairs.ravel(), minlength=experts * experts).reshape(experts, experts)


def coactivation_counts(ids: np.ndarray, experts: int, reach: int = REACH) -> np.ndarray:
    """Returns n[(l − 1 − d, i) → (l, j)] at [l, d, i, j], float32[L, reach, E, E]: tokens that used
    expert i in the layer d + 1 before l, and j in l.

    - `ids`: int[N, L, k], experts that each token was routed to.
    """
    layers = ids.shape[1]
    pairs = np.zeros((layers, reach, experts, experts), np.float32)
    for layer in range(1, layers):
        for d in range(min(reach, layer)):
            pairs[layer, d] = pair_counts(ids[:, layer - 1 - d], ids[:, layer], experts)
    return pairs


def likelihoods(pairs: np.ndarray, top_k: int) -> np.ndarray:
    """Returns P(j | i) by counts [E, E], float[E, E]. Every token chooses top-k experts, so the sum
    over j counts each use of i k times."""
    alone = pairs.sum(axis=1, keepdims=True) / top_k
    return np.divide(pairs, alone, out=np.zeros_like(pairs), where=alone > 0)


def predicted_use(
    pairs: np.ndarray, top_k: int, *, decay: float = 0.5, first: np.ndarray | None = None
) -> np.ndarray:
    """Returns predicted shares of each layer's use by co-activation counts, float64[L, E]; rows sum
    to 1. The score of j is Σ over the layers d + 1 before of decay^d · Σ_i use(i)·P(j|i).

    - `pairs`: float[L, reach, E, E], of one user or of all.
    - `first`: float[E], how a user's tokens use the first layer; None: as in the counts. So counts
      of all users and the little that is known of one user predict what that user will need.

    Raises ValueError if a layer has no counts: the predictor is empty there.
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
        # Unseen experts predict nothing; a user of only unseen experts is unknown.
        total = use[layer].sum()
        use[layer] = use[layer] / total if total else 1 / experts
    return use
