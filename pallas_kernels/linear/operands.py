"""Operands of the products of `linear`, beside x and the weights."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.cards import CLASSES


class Norm(NamedTuple):
    """The rms_norm of x before a product."""

    weights: Float[Array, "L K"]
    eps: float
    squares: Float[Array, "T C"] | None = None
    """tile_squares of x, of any width, which a kernel reads instead of the rows, with the same
    bits. None: each program reads its rows."""


class Tiling(NamedTuple):
    """How an implementation divides the rows; see LinearOptions."""

    row_tile: int
    tiles: Int[Array, ""] | int
    shared_kib: int
    arithmetic: str = "exact"


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """Which rows are computed, and by which implementation."""

    row_tile: int | None = None
    """Rows of one product, a divisor of T. It decides the bits; T does not. None: all rows."""
    tiles: Int[Array, ""] | int | None = None
    """Computes only this many row tiles; later rows are undefined. None: all tiles."""
    implementation: str = "xla"
    norm_implementation: str = "xla"
    """Implementation of the rms_norm, if there is one."""
    arithmetic: str = "exact"
    """Of products with CodedWeights, one of pallas_kernels.records.integers.ARITHMETICS."""
    shared_kib: int = CLASSES[-1]
    """The device's `cards.shared_class`, for the kernel."""

    def tiling(self, rows: int) -> Tiling:
        """The tiling of this many rows. Raises ValueError for no rows, and if they are
        not whole tiles."""
        if not rows:
            raise ValueError("x has no rows; linear needs at least one")
        tile = rows if self.row_tile is None else self.row_tile
        if tile < 1 or rows % tile:
            raise ValueError(f"{rows} rows are not whole tiles of {tile}")
        tiles = rows // tile if self.tiles is None else self.tiles
        return Tiling(tile, tiles, self.shared_kib, self.arithmetic)


EVERY_ROW = LinearOptions()
"""All rows, by XLA."""
