"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) and Kimi delta attention
(arXiv:2510.26692) behind a short convolution, over states in pages."""

from pallas_kernels.gated_delta.api import (
    DeltaHeads,
    DeltaOptions,
    DeltaShape,
    DeltaWeights,
    gated_delta,
)

__all__ = ["DeltaHeads", "DeltaOptions", "DeltaShape", "DeltaWeights", "gated_delta"]
