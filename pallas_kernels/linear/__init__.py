"""Dense products over stacked weights by layer index."""

from pallas_kernels.linear.api import linear

__all__ = ["linear"]
