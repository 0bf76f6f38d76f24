"""Shapes that tests of truncate share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    rows: int
    vocabulary: int


SPECS = (Spec(1, 1), Spec(3, 96), Spec(2, 2048), Spec(5, 4099), Spec(16, 1000))
"""At most one tile, whole tiles, and three tiles of which the last has three tokens."""
