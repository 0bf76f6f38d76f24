"""Shapes that tests and benches of route share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    experts: int
    top_k: int
    normalize: bool = True


SPECS = (
    *(Spec(tokens, 16, 4) for tokens in (1, 2, 3, 15, 16, 17, 64, 65)),
    Spec(17, 128, 8),
    Spec(17, 60, 4, normalize=False),
    Spec(3, 8, 1),
    Spec(3, 8, 1, normalize=False),
    Spec(3, 8, 8),
)
