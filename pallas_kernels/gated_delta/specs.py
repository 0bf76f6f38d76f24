"""Shapes that tests and benches of gated_delta share."""

from __future__ import annotations

import dataclasses

from pallas_kernels.gated_delta.api import DeltaShape

SHAPE = DeltaShape(2, 4, 8, 12, 4)


@dataclasses.dataclass(frozen=True)
class Spec:
    lengths: tuple[int, ...]
    """New tokens of each sequence."""
    dtype: str
    shape: DeltaShape = SHAPE
    layers: int = 3
    row_values: int = 20
    """Values of a KV row."""
    page_rows: int = 10
    by_key_head: bool = False


SPECS = (
    Spec((1,), "float32"),
    Spec((1, 5, 3), "bfloat16"),
    Spec((7, 2), "float32", page_rows=1000),
    Spec((37,), "float16", DeltaShape(1, 2, 16, 16, 2), row_values=32),
    Spec((9,), "float32", DeltaShape(1, 3, 4, 4, 3), row_values=7),
    Spec((6, 3), "bfloat16", DeltaShape(3, 3, 8, 8, 4, each=True)),
    Spec((6, 40), "bfloat16", DeltaShape(2, 2, 24, 16, 4, each=True), row_values=32),
    Spec((6, 3), "bfloat16", DeltaShape(3, 6, 8, 4, 4), by_key_head=True),
)
