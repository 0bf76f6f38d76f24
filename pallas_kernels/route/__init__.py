"""Router: scores of experts, the choice of each token's experts, their weights."""

from pallas_kernels.route.api import (
    NormRouteOptions,
    RouteOperands,
    RouteRule,
    norm_route_and_list,
    route,
    route_and_list,
    route_and_plan,
    why_not_pallas,
)
from pallas_kernels.route.reference import weigh
from pallas_kernels.route.scores import route_scores

__all__ = [
    "NormRouteOptions",
    "RouteOperands",
    "RouteRule",
    "norm_route_and_list",
    "route",
    "route_and_list",
    "route_and_plan",
    "route_scores",
    "weigh",
    "why_not_pallas",
]
