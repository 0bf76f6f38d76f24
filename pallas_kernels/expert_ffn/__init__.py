"""Gated feed-forward of the active experts, read by slot address or straight from the store."""

from pallas_kernels.expert_ffn.api import ACTIVATIONS, expert_ffn, sorted_pairs

__all__ = ["ACTIVATIONS", "expert_ffn", "sorted_pairs"]
