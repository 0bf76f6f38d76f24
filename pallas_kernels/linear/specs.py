"""Shapes that tests and benches of linear share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    inputs: int = 48
    outputs: int = 40
    layers: int = 2
    bias: bool = False
    out_dtype: str | None = None
    row_tile: int | None = None
    tiles: int | None = None
    """Row tiles that are computed; None: all."""


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3, 15, 16, 17, 64, 65)),
    Spec(1, "float32", bias=True),
    Spec(17, "float32", inputs=33, outputs=7),
    Spec(17, "float16", bias=True),
    Spec(3, "bfloat16", bias=True, out_dtype="float32"),
    Spec(64, "bfloat16", row_tile=16),
    Spec(64, "float32", bias=True, row_tile=16, tiles=3),
    Spec(64, "bfloat16", bias=True, row_tile=16, tiles=3),
    Spec(6, "bfloat16", row_tile=2, tiles=0),
    Spec(16, "bfloat16", inputs=512, outputs=48),
    Spec(17, "float16", inputs=600, outputs=55, bias=True),
    Spec(3, "bfloat16", inputs=16, outputs=4100),
    Spec(1, "bfloat16", inputs=200, outputs=16390),
    Spec(128, "bfloat16", inputs=128, outputs=256, row_tile=64, tiles=1),
    Spec(128, "bfloat16", inputs=200, outputs=150, bias=True, row_tile=64),
    Spec(80, "bfloat16", inputs=384, outputs=192, bias=True, row_tile=16, tiles=3),
)
