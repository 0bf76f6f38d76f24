"""Shapes that tests and benches of kv_write share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 3
    attention_factor: float = 1.0
    norms: bool = True


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3)),
    Spec(17, "bfloat16", norms=False),
    *(Spec(tokens, "bfloat16") for tokens in (15, 16, 17, 64, 65)),
    Spec(17, "bfloat16", block_size=32),
    Spec(17, "bfloat16", block_size=64, heads=1, kv_heads=1),
    Spec(17, "float32", attention_factor=1.25),
    Spec(17, "float32", block_size=32, heads=6, kv_heads=2, head_dim=24),
    Spec(17, "float32", norms=False),
    Spec(3, "float16", block_size=64),
    Spec(17, "bfloat16", heads=3, kv_heads=1, head_dim=6),
)
