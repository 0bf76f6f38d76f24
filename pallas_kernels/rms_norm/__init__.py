"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from pallas_kernels.rms_norm.api import check_squares, rms_norm, tile_squares

__all__ = ["check_squares", "rms_norm", "tile_squares"]
