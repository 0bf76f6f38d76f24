"""Shapes that tests and benches of selective_scan share."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.selective_scan.api import ScanShape

SHAPE = ScanShape(4, 12, 2, 8)


@dataclasses.dataclass(frozen=True)
class Spec:
    lengths: tuple[int, ...]
    """New tokens of each sequence."""
    dtype: str
    shape: ScanShape = SHAPE
    limits: tuple[float, float] = (0.0, math.inf)
    layers: int = 3
    row_values: int = 20
    """Values of a KV row."""
    page_rows: int = 10


SPECS = (
    Spec((1,), "float32"),
    Spec((1, 5, 3), "bfloat16", limits=(0.3, 0.9)),
    Spec((7, 2), "float32", ScanShape(2, 20, 1, 16, each=True), page_rows=1000),
    Spec((37,), "float16", ScanShape(3, 16, 3, 16), row_values=32),
    Spec((9,), "float32", ScanShape(3, 5, 1, 4, each=True), row_values=7),
)
