"""How far from a row's likeliest token top-k and top-p of sampling reach."""

from pallas_kernels.truncate.api import truncate

__all__ = ["truncate"]
