"""Dense products over stacked weights by layer index."""

from pallas_kernels.linear.api import (
    check_normed,
    linear,
    linear_parts,
    linear_with_squares,
    norm_linear,
    norm_linear_parts,
    normalises_within,
)
from pallas_kernels.linear.coded import CodedLayers, CodedWeights, lay_out
from pallas_kernels.linear.operands import LinearOptions, Norm
from pallas_kernels.linear.parts import sum_of_parts

__all__ = [
    "CodedLayers",
    "CodedWeights",
    "LinearOptions",
    "Norm",
    "check_normed",
    "lay_out",
    "linear",
    "linear_parts",
    "linear_with_squares",
    "norm_linear",
    "norm_linear_parts",
    "normalises_within",
    "sum_of_parts",
]
