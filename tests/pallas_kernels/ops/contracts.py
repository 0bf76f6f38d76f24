"""The contracts of all ops."""

from tests.pallas_kernels.ops import (
    combine,
    combined_experts,
    decode_attention,
    expert_ffn,
    fill,
    fill_ffn,
    gated_delta,
    head_linear,
    linear,
    move,
    norms,
    page_writes,
    plan,
    prefill_attention,
    route,
    routed,
    sample,
    selective_scan,
    short_conv,
    stage,
    truncate,
    write_and_attend,
)

CONTRACTS = (
    *linear.CONTRACTS,
    *head_linear.CONTRACTS,
    *norms.CONTRACTS,
    *page_writes.CONTRACTS,
    *decode_attention.CONTRACTS,
    *prefill_attention.CONTRACTS,
    *gated_delta.CONTRACTS,
    *short_conv.CONTRACTS,
    *selective_scan.CONTRACTS,
    *write_and_attend.CONTRACTS,
    *route.CONTRACTS,
    *routed.CONTRACTS,
    *plan.CONTRACTS,
    *fill.CONTRACTS,
    *stage.CONTRACTS,
    *move.CONTRACTS,
    *expert_ffn.CONTRACTS,
    *fill_ffn.CONTRACTS,
    *combined_experts.CONTRACTS,
    *combine.CONTRACTS,
    *truncate.CONTRACTS,
    *sample.CONTRACTS,
)

LATER = ("prefill_attention", "prefill_attention over latent pages", "fill in transit")
"""Contracts whose PTX takes minutes to interpret, so tests/ptx has them at night alone."""
