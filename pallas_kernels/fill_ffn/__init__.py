"""fill and expert_ffn of a decode step in one op: hits are computed while misses arrive."""

from pallas_kernels.fill_ffn.api import fill_ffn
from pallas_kernels.fill_ffn.versions import why_not_pallas

__all__ = ["fill_ffn", "why_not_pallas"]
