"""Shapes that tests and benches of expert_ffn share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    routing: str = "some"
    """Where tokens go: "some" leaves a quarter of the experts idle, "one" sends every token to the
    last expert too, "padded" has padding rows at the end, "none" nothing else."""
    experts: int = 8
    top_k: int = 2
    hidden: int = 32
    width: int = 24
    layers: int = 2
    row_tile: int = 16


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3, 15, 16, 17, 64, 65, 2048)),
    Spec(1, "float32"),
    Spec(17, "float32", "padded"),
    Spec(65, "float32", "one", row_tile=8),
    Spec(17, "float32", width=10, hidden=40, top_k=3),
    Spec(17, "bfloat16", "one", top_k=1),
    Spec(64, "bfloat16", "padded", experts=3, top_k=3, row_tile=64),
    Spec(1, "bfloat16", row_tile=64),
    Spec(65, "bfloat16", "one", row_tile=64),
    Spec(2048, "bfloat16", row_tile=64),
    Spec(3, "bfloat16", "none"),
    Spec(3, "bfloat16", "none", row_tile=64),
    Spec(33, "bfloat16", "one", experts=16, top_k=4, hidden=192, width=80),
    Spec(33, "bfloat16", "one", experts=16, top_k=4, hidden=192, width=80, row_tile=64),
    Spec(17, "bfloat16", width=10, hidden=40, top_k=3),
    Spec(17, "bfloat16", width=10, hidden=40, top_k=3, row_tile=64),
    Spec(3, "float16"),
    Spec(17, "float16", "padded"),
)
