"""Shapes and rules that tests and benches of route share."""

from __future__ import annotations

import dataclasses

from pallas_kernels.route.rule import RouteRule

RULES = {
    "top1": RouteRule(1),
    "top1-normalized": RouteRule(1, normalize=True),
    "top4": RouteRule(4),
    "top4-normalized": RouteRule(4, normalize=True),
    "top8-normalized": RouteRule(8, normalize=True),
    "deepseek-v2": RouteRule(6, groups=8, top_groups=3, scale=16.0),
    "deepseek-v3": RouteRule(
        8,
        normalize=True,
        scoring="sigmoid",
        groups=8,
        top_groups=4,
        group_score="top2",
        scale=2.5,
    ),
    "moonlight": RouteRule(6, normalize=True, scoring="sigmoid", scale=2.446),
    "sigmoid-groups": RouteRule(3, scoring="sigmoid", groups=3, top_groups=2),
    "ernie": RouteRule(6, normalize=True),
    "phi-3.5": RouteRule(2, scoring="sparsemixer", jitter=0.01),
    "wide-jitter": RouteRule(2, scoring="sparsemixer", jitter=0.13),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    experts: int
    rule: str
    """A name in RULES."""
    correction: bool = False


SPECS = (
    Spec(17, 16, "top4-normalized"),
    Spec(17, 160, "deepseek-v2"),
    Spec(17, 256, "deepseek-v3", correction=True),
    Spec(17, 16, "wide-jitter"),
    Spec(17, 60, "top4"),
    Spec(1, 16, "top4-normalized"),
    Spec(65, 64, "moonlight", correction=True),
    Spec(17, 64, "ernie", correction=True),
    Spec(3, 12, "sigmoid-groups"),
    Spec(3, 8, "top1-normalized"),
    *(Spec(tokens, 16, "top4-normalized") for tokens in (2, 3, 15, 16, 64, 65)),
    Spec(17, 128, "top8-normalized"),
    Spec(3, 8, "top1"),
    Spec(3, 8, "top8-normalized"),
    Spec(65, 16, "phi-3.5"),
    Spec(2, 12, "sigmoid-groups", correction=True),
)


@dataclasses.dataclass(frozen=True)
class PlannedSpec:
    """A case of route_and_plan."""

    tokens: int
    experts: int
    cells: int
    rule: str
    correction: bool = False
    parts: int = 3
    versions: int = 1


PLANNED_SPECS = (
    PlannedSpec(4, 60, 9, "top4-normalized"),
    PlannedSpec(16, 64, 64, "moonlight", correction=True, versions=2),
    PlannedSpec(16, 8, 3, "phi-3.5", parts=5),
    PlannedSpec(1, 16, 16, "top1", parts=1),
    PlannedSpec(17, 16, 5, "top4"),
    PlannedSpec(4, 12, 12, "sigmoid-groups"),
)
"""The last two are for two kernels: too many tokens, groups."""
