"""Shapes that tests and benches of combine share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    """The dtype of the residual and the result."""
    top_k: int = 4
    hidden: int = 40


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3, 15, 16, 17, 64, 65)),
    Spec(3, "float32", top_k=1),
    Spec(17, "float32", top_k=8, hidden=33),
    Spec(17, "float16"),
    Spec(3, "bfloat16", top_k=1),
    Spec(3, "bfloat16", top_k=8, hidden=600),
    Spec(2, "bfloat16", top_k=2, hidden=512),
)
