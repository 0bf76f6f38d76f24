"""Shapes that tests and benches of latent_write share."""

from __future__ import annotations

import dataclasses

from pallas_kernels.kv_write import KVPage


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    block_size: int = 16
    heads: int = 4
    latent: int = 16
    rope: int = 8
    layers: int = 3
    attention_factor: float = 1.0
    interleave: bool = True

    @property
    def page(self) -> KVPage:
        return KVPage(self.block_size, 1, self.latent + self.rope, self.latent)


SPECS = (
    Spec(1, "bfloat16"),
    Spec(17, "bfloat16", interleave=False),
    Spec(17, "float32", attention_factor=1.25),
    Spec(17, "float32", block_size=64, heads=1, latent=20, rope=2, interleave=False),
    Spec(3, "float16", block_size=32),
    Spec(64, "bfloat16", latent=512, rope=64, heads=3),
    Spec(65, "bfloat16", heads=5),
)
