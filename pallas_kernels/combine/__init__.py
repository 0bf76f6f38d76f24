"""The weighted sum of a token's experts, in a fixed order."""

from pallas_kernels.combine.api import combine

__all__ = ["combine"]
