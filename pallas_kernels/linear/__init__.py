"""Dense products over stacked weights by layer index."""

from pallas_kernels.linear.api import (
    linear,
    linear_parts,
    linear_with_squares,
    norm_linear,
    norm_linear_parts,
    norm_operands,
    normalises_within,
)
from pallas_kernels.linear.parts import sum_of_parts

__all__ = [
    "linear",
    "linear_parts",
    "linear_with_squares",
    "norm_linear",
    "norm_linear_parts",
    "norm_operands",
    "normalises_within",
    "sum_of_parts",
]
