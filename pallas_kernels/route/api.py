from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import pick
from pallas_kernels.route import pallas_triton, reference

IMPLEMENTATIONS = {"xla": reference.route, "pallas": pallas_triton.route}


def route(
    logits: Float[Array, "T E"],
    valid: Bool[Array, " T"],
    *,
    top_k: int,
    normalize: bool,
    implementation: str = "xla",
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Chooses each token's experts.

    logits: float32 router logits. valid: rows that hold a token; the others get ids E and weights
    0. normalize: divide the chosen probabilities by their sum (`norm_topk_prob`).

    Returns (ids, weights), each [T, K], a token's ids **ascending**: slot k of every later array
    is the rank of the expert id within the token, which fixes the order of the final sum whatever
    computed the parts. Ties go to the lower id. Weights are float32.

    Raises ValueError for a top_k outside 1…E or an unknown implementation.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k is {top_k}, there are {logits.shape[-1]} experts")
    fn = pick("route", IMPLEMENTATIONS, implementation)
    return fn(logits, valid, top_k=top_k, normalize=normalize)
