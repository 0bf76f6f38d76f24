"""Decides which of a layer's active experts are hits, fills and read-throughs, and picks
victims."""

from pallas_kernels.plan.api import Plan, Tables, plan, plan_counts, plan_routed, routed_to
from pallas_kernels.plan.resident import plan_resident
from pallas_kernels.plan.victim import LOG2_UNIT, log2_fixed, victim_key

__all__ = [
    "LOG2_UNIT",
    "Plan",
    "Tables",
    "log2_fixed",
    "plan",
    "plan_counts",
    "plan_resident",
    "plan_routed",
    "routed_to",
    "victim_key",
]
