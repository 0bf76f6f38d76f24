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


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3, 15, 16, 17, 64, 65)),
    Spec(1, "float32", bias=True),
    Spec(17, "float32", inputs=33, outputs=7),
    Spec(17, "float16", bias=True),
    Spec(3, "bfloat16", bias=True, out_dtype="float32"),
)
