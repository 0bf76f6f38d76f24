"""Shapes that tests and benches of layer_norm share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    rows: tuple[int, ...]
    dtype: str
    width: int = 40
    layers: int = 2
    scale: float = 1.0
    """The inputs' standard deviation: small ones show eps."""


SPECS = (
    *(Spec((tokens,), "bfloat16") for tokens in (1, 17)),
    Spec((17,), "float32"),
    Spec((17,), "bfloat16", scale=1e-3),
    Spec((3, 2), "float16", width=33),
    Spec((5, 3), "bfloat16", width=16),
    Spec((17,), "float32", scale=1e-3),
    *(Spec((tokens,), "bfloat16") for tokens in (16, 64, 65)),
    Spec((2,), "bfloat16", width=4096),
)
