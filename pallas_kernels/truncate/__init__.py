"""The largest distance from a row's likeliest token that top-k and top-p of sampling keep."""

from pallas_kernels.truncate.api import truncate

__all__ = ["truncate"]
