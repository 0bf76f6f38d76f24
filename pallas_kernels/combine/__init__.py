"""The weighted sum of a token's experts, in a fixed order."""

from pallas_kernels.combine.api import (
    combine,
    combine_and_count,
    combine_with_squares,
    row_squares,
)

__all__ = ["combine", "combine_and_count", "combine_with_squares", "row_squares"]
