"""Shapes that tests and benches of move share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    cells: int = 5
    """C, the bound of cells a layer."""
    experts: int = 4
    entries: int = 6
    """S, the length of a list."""
    record_rows: tuple[int, ...] = (5, 2)
    """Per version: arena rows of one record."""
    layers: int = 2
    hidden: int = 16


SPECS = (Spec(), Spec(1, 1, 1, (1,), 1), Spec(3, 4, 2, (40, 9, 64), hidden=1032))
"""Two versions, the smallest, and records of several chunks of a width that is no power of two."""
