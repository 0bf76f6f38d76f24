"""Shapes that tests and benches of short_conv share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    lengths: tuple[int, ...]
    """New tokens of each sequence."""
    dtype: str
    width: int = 40
    taps: int = 3
    layers: int = 3
    row_values: int = 20
    """Values of a KV row."""
    page_rows: int = 5
    silu: bool = False
    """Whether there is a bias, and silu behind it."""


SPECS = (
    Spec((1,), "float32"),
    Spec((1, 5, 3), "bfloat16"),
    Spec((7, 2), "float32", width=600, page_rows=1000),
    Spec((4,), "float16", taps=2),
    Spec((5, 3), "bfloat16", silu=True),
)
