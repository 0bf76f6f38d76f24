"""Shapes that tests and benches of stage share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    cells: int
    """C, the bound of cells a layer."""
    experts: int
    entries: int
    """S, the length of a list."""
    record_rows: tuple[int, ...] = (3, 1)
    """Per version: arena rows of one record."""
    layers: int = 2
    hidden: int = 16


SPECS = (Spec(5, 8, 6), Spec(1, 1, 1, (1,)), Spec(12, 6, 9, (3, 1, 2)))
"""Fewer cells than experts, the smallest, more cells than experts."""
