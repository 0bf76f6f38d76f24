"""One product per head over stacked weights by layer index."""

from pallas_kernels.head_linear.api import head_linear

__all__ = ["head_linear"]
