"""Table sizes that tests and benches of plan share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    layers: int
    cells: int
    """C, the bound of cells a layer."""
    experts: int


SPECS = (Spec(2, 5, 8), Spec(1, 1, 1), Spec(1, 12, 6))
"""Fewer cells than experts, the smallest tables, more cells than experts."""
