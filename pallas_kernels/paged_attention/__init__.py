"""Attention over pages: one token of many sequences (decode), one chunk of one (prefill)."""

from pallas_kernels.paged_attention.api import (
    SPAN,
    AttentionOptions,
    Chunks,
    decode_attention,
    prefill_attention,
    write_and_attend,
)
from pallas_kernels.paged_attention.pallas_triton import why_not_pallas
from pallas_kernels.paged_attention.per_layer import NO_WINDOW, Indexer, PerLayer

__all__ = [
    "NO_WINDOW",
    "SPAN",
    "AttentionOptions",
    "Chunks",
    "Indexer",
    "PerLayer",
    "decode_attention",
    "prefill_attention",
    "why_not_pallas",
    "write_and_attend",
]
