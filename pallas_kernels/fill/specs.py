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


SPECS = (
    Spec((12,)),
    Spec((1,), experts=1, layers=1),
    Spec((12, 4)),
    Spec((40, 9, 64), experts=2, hidden=1032),
)
"""One version, the smallest, two of different sizes, and records of several chunks of a width that
is no power of two."""
