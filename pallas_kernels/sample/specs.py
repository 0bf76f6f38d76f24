"""Shapes that tests of sample share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    rows: int
    vocabulary: int


SPECS = (Spec(8, 1000), Spec(1, 1), Spec(3, 4099), Spec(16, 33))
"""Whole vectors and the ends of them, of every instruction set."""
