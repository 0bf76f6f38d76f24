"""Moves missing experts from the store into their cells, inside the step."""

from pallas_kernels.fill.api import Fills, fill

__all__ = ["Fills", "fill"]
