"""How a model turns router logits into experts and weights."""

from __future__ import annotations

import dataclasses
import math

SCORINGS = ("softmax", "sigmoid", "sparsemixer", "sqrtsoftplus")
GROUP_SCORES = ("max", "top2")


@dataclasses.dataclass(frozen=True)
class RouteRule:
    """The rule of a model's routers, as transformers 5.24 computes it in evaluation.

    Softmax over experts and top-k: Switch and its successors (Mixtral, OLMoE, Qwen; DeepSeek-V2
    with groups, arXiv 2405.04434 eq. 20-22; ERNIE-4.5 with a correction). Sigmoid: DeepSeek-V3
    (arXiv 2412.19437 eq. 12-16), GLM-4.5. Root of softplus: DeepSeek-V4. Sparsemixer: Phi-3.5-MoE
    (arXiv 2409.12136), which takes two experts one after the other and weighs each by a softmax
    over the experts that come near to it.

    Raises ValueError for values that are not allowed, alone or together.
    """

    top_k: int
    """Experts of a token."""
    normalize: bool = False
    """Divide the chosen scores by their sum (for a softmax with a correction, at least 1e-12)."""
    scoring: str = "softmax"
    """One of SCORINGS."""
    groups: int = 1
    """Number of groups of consecutive experts, of equal size. Only experts of the best `top_groups`
    groups can be chosen."""
    top_groups: int = 1
    """Groups whose experts can be chosen."""
    group_score: str = "max"
    """A group's score: its best expert's ("max"), or the sum of its two best ("top2")."""
    scale: float = 1.0
    """Factor of the weights, after normalisation."""
    jitter: float = 0.0
    """Sparsemixer: an expert is near the best one if its logit is smaller by at most 2 · jitter
    times the larger of its own magnitude and the best logit (`router_jitter_noise`)."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {self.scoring!r}; there are {', '.join(SCORINGS)}")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(
                f"group_score is {self.group_score!r}; there are {', '.join(GROUP_SCORES)}"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups is {self.top_groups}, there are {self.groups} groups")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a positive number, not {self.scale}")
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"jitter must be a number from zero up, not {self.jitter}")
        if self.scoring != "sparsemixer":
            if self.jitter:
                raise ValueError(f"only sparsemixer has a jitter, {self.scoring} has none")
            return
        if self.top_k != 2:
            raise ValueError(f"sparsemixer chooses 2 experts, top_k is {self.top_k}")
        if self.normalize or self.groups > 1:
            raise ValueError("sparsemixer neither normalizes nor has groups")

    def check(self, experts: int, *, correction: bool) -> None:
        """Raises ValueError if a router with this number of experts cannot follow the rule."""
        if self.top_k > experts:
            raise ValueError(f"top_k is {self.top_k}, there are {experts} experts")
        if experts % self.groups:
            raise ValueError(f"{experts} experts are not {self.groups} groups of as many")
        size = experts // self.groups
        if self.group_score == "top2" and self.groups > 1 and size < 2:
            raise ValueError(
                "group_score 'top2' needs 2 experts in a group, "
                f"{experts} experts are {self.groups} groups"
            )
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"top_k is {self.top_k}, {self.top_groups} groups have {self.top_groups * size} "
                "experts"
            )
        if correction and self.scoring == "sparsemixer":
            raise ValueError("sparsemixer takes no correction")
