from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.linear import sum_of_parts
from pallas_kernels.route.pallas_triton import why_not_pallas
from pallas_kernels.route.rule import RouteRule

__all__ = ["IMPLEMENTATIONS", "RouteRule", "route", "why_not_pallas"]

IMPLEMENTATIONS = implementations("route", ("xla", "pallas", "cpu"))


def route(
    logits: Float[Array, "*S T E"],
    valid: Bool[Array, " T"],
    correction: Float[Array, "L E"] | None = None,
    layer: Int[Array, ""] | int = 0,
    *,
    rule: RouteRule,
    implementation: str = "xla",
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Chooses each token's experts.

    logits: float32 router logits, or the parts [S, T, E] of linear_parts that add up to them.
    valid: rows that hold a token; the others get ids E and weights 0. correction: stacked over
    layers, float32; correction[layer] is added to the scores for the choice of groups and experts,
    not for the weights (`e_score_correction_bias`).

    Returns (ids, weights), each [T, K], a token's ids **ascending**: slot k of every later array
    is the rank of the expert id within the token, which fixes the order of the final sum whatever
    computed the parts. Ties go to the lower id, of experts and of groups. Weights are float32. A
    token whose logits have a NaN gets ids that exist and weights that are NaN.

    Raises ValueError for a rule that the number of experts does not allow, a correction that does
    not fit, an unknown implementation, or a rule that the implementation cannot follow.
    """
    experts = logits.shape[-1]
    rule.check(experts, correction=correction is not None)
    if correction is not None and (correction.ndim != 2 or correction.shape[1] != experts):
        raise ValueError(f"correction is {correction.shape}, it must be [layers, {experts}]")
    fn = pick("route", IMPLEMENTATIONS, implementation)
    if implementation != "pallas":
        logits = summed(logits)
    return fn(logits, valid, correction, layer, rule=rule)


def summed(logits: Float[Array, "*S T E"]) -> Float[Array, "T E"]:
    """The logits themselves, where they come in parts."""
    return logits if logits.ndim == 2 else sum_of_parts(logits)
