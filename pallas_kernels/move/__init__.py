"""Moves cells inside the arena between two steps, so that whole slots become free."""

from pallas_kernels.move.api import Moves, move

__all__ = ["Moves", "move"]
