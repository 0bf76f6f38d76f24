"""Gated feed-forward of the active experts, read by slot address or straight from the store."""

from pallas_kernels.expert_ffn.activation import Activation, ClampedSwiGLU, gated
from pallas_kernels.expert_ffn.api import ACTIVATIONS, expert_ffn, sorted_pairs
from pallas_kernels.expert_ffn.epilogue import Combined, Epilogue, counters_size
from pallas_kernels.expert_ffn.operands import (
    ExpertBatch,
    ExpertOptions,
    ExpertPlaces,
    why_not_mosaic,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ClampedSwiGLU",
    "Combined",
    "Epilogue",
    "ExpertBatch",
    "ExpertOptions",
    "ExpertPlaces",
    "counters_size",
    "expert_ffn",
    "gated",
    "sorted_pairs",
    "why_not_mosaic",
]
