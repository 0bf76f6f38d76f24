"""Shapes that tests and benches of fill share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    record_rows: tuple[int, ...]
    """Per version: arena rows of one record."""
    experts: int = 6
    layers: int = 3
    hidden: int = 16


@dataclasses.dataclass(frozen=True)
class TransitSpec:
    """lossless12 in the store and dense in cells, beside a version that is copied as it is."""

    hidden: int
    width: int
    experts: int = 4
    layers: int = 2
    biases: bool = False
    gated: bool = True


TRANSIT_SPECS = (
    TransitSpec(64, 32),
    TransitSpec(40, 10, layers=3),
    TransitSpec(96, 320),
    TransitSpec(2112, 8, experts=2),
    TransitSpec(40, 90, biases=True),
    TransitSpec(2112, 8, experts=2, biases=True, gated=False),
)
"""Planes that tiles divide; where 4 divides neither I nor a power of two D; several tiles of codes
of rows and of columns; biases; experts of two matrices."""

SPECS = (
    Spec((12,)),
    Spec((1,), experts=1, layers=1),
    Spec((12, 4)),
    Spec((40, 9, 64), experts=2, hidden=1032),
)
"""One version, the smallest, two of different sizes, and records of several chunks of a width that
is no power of two."""
