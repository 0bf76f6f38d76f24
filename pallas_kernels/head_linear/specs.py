"""Shapes that tests and benches of head_linear share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    heads: int = 3
    inputs: int = 48
    outputs: int = 40
    layers: int = 2
    row_tile: int | None = None
    tiles: int | None = None
    """Row tiles that are computed; None: all."""
    transposed: bool = False
    before: int = 0
    """Rows of a head's weights before the part that is used."""
    after: int = 0
    """Rows after it."""


SPECS = (
    Spec(1, "bfloat16"),
    Spec(17, "float32", heads=1, inputs=33, outputs=7),
    Spec(64, "bfloat16", row_tile=16, tiles=3),
    Spec(3, "float16", inputs=200),
    Spec(64, "float32", row_tile=16),
    Spec(6, "bfloat16", row_tile=2, tiles=0),
    Spec(64, "bfloat16", heads=16, inputs=128, outputs=512),
    Spec(17, "bfloat16", transposed=True, after=24),
    Spec(17, "float32", transposed=True, inputs=33, outputs=7, before=3),
    Spec(64, "float16", row_tile=16, tiles=3, inputs=600, outputs=55, before=16),
    Spec(
        64, "bfloat16", heads=16, inputs=128, outputs=512, row_tile=64, transposed=True, after=128
    ),
    Spec(128, "bfloat16", inputs=200, outputs=150, row_tile=64, tiles=1, before=200),
)
